r"""Says patterns with lookaheads, which are not compiled, by further patterns without any.

`^(?=x)y` is `^x` and `^y`; `^(?!x)y` is `^y` and a pattern that `^x` does not match. The latter is known for what
schemas have there: a word, a class of characters that is repeated to the end, the end of the text, two in a row. What
must not follow anywhere behind a place (`(?!.*x)` in the middle) must then not be in the text at all, which is less
than the pattern allows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ktcli.answers.grammar.meaning import rewritten
from ktcli.answers.grammar.narrowing import Narrowing

_CLASS = r"\[(?:\\.|[^\]\\])+\]"
_ESCAPED = r"\\[dDsSwW]"
_LETTER = r"\\[^\w\s]|[\w\s:@/=_,;!#%&<>~'\"-]"  # what stands for itself
_MARKS = frozenset(r"\^$.|?*+()[]{}-&~")
_SET = f"(?:{_CLASS}|{_ESCAPED}|{_LETTER})"
# What is behind `(?!` and a `^` that may repeat the pattern's own, and what matches where it does not.
_REPEATED = re.compile(rf"({_SET})([*+])\$")
_WORD = re.compile(rf"((?:{_SET})+)(\$?)")
_CHOICE = re.compile(rf"(?:\((?:\?:)?)?((?:{_SET})*\$?(?:\|(?:{_SET})*\$?)+)(?:\)(\$)?)?")
_LAST = re.compile(rf"\.\*({_SET})\$")
_TWICE = re.compile(rf"\.\*({_SET})\{{2\}}")
_DOUBLED = re.compile(rf"\.\*({_LETTER})\1")
_SOMEWHERE = re.compile(rf"\.\*({_SET})")
_LOOKAHEAD = re.compile(r"\(\?([=!])")
_BEHIND = "(?!.*"
_AT_END = r"(?![\s\S])"
_LAST_BEFORE = re.compile(rf"(?<!\\)\(\?<!({_SET})\)\$$")
_MOST = 64  # patterns in place of one
_MOST_CHARS = 2000  # of a pattern: what is done with one is quadratic in them
_MOST_LETTERS = 100  # of a word, each of whose beginnings is written out


def without_lookaheads(schema: Any) -> Any:
    """Returns a JSON schema whose patterns have no lookaheads: in their place stand equal patterns where these are
    known, else narrower ones; a pattern of which neither is known stays.
    """
    narrowing = Narrowing()
    return rewritten(schema, lambda found, _: _without_lookaheads(found, narrowing))


def _without_lookaheads(found: dict[str, Any], narrowing: Narrowing) -> dict[str, Any]:
    pattern, further = found.get("pattern"), found.get("allOf", [])
    if not isinstance(pattern, str) or not isinstance(further, list):
        return found
    if parts := _parts(pattern):
        found["pattern"], *others = parts
        found["allOf"] = [*further, *({"pattern": each} for each in others)]
    words: dict[str, Any] = {
        key: found[key] for key in ("pattern", "allOf", "minLength", "maxLength") if key in found
    }
    if not narrowing.is_compiled({"type": "string", **words}):
        least, most = found.get("minLength", 0), found.get("maxLength")
        is_known = type(least) is int and (most is None or type(most) is int)
        if is_known and (narrower := narrowing.narrowed(pattern, least, most)):
            found = {key: each for key, each in found.items() if key not in words}
            found |= {"pattern": narrower, **({"allOf": further} if further else {})}
    return found


def _parts(pattern: str) -> list[str]:
    """Returns patterns that a text must match all, in place of one; empty: it has no lookahead, or one that is not
    known."""
    if len(pattern) > _MOST_CHARS:
        return []
    whole, others = _without_further(pattern)
    rest = whole.removeprefix("^")
    anchored = rest is not whole
    while (found := _LOOKAHEAD.match(rest)) and len(others) < _MOST:
        end = _closing(rest)
        body = rest[found.end() : end]
        # Without `^`, a text may match behind its beginning: only what must not be there can be said.
        known = anchored or (found[1] == "!" and body.startswith("^"))
        if end < 0 or not known or _LOOKAHEAD.search(body):
            return []
        some = [f"^(?:{body})"] if found[1] == "=" else _others_than(body.removeprefix("^"))
        if not all(some):
            return []
        others += some
        rest = rest[end + 1 :]
    return [f"^{rest}" if anchored else rest, *others] if others or whole != pattern else []


def _without_further(pattern: str) -> tuple[str, list[str]]:
    """Returns a pattern without what it says about what is not behind a place in it, and patterns that say it of the
    whole text."""
    rest, others, at = pattern, list[str](), 0
    if rest.endswith(_AT_END):
        rest = rest.removesuffix(_AT_END) + "$"
    if found := _LAST_BEFORE.search(rest):
        rest = f"{rest[: found.start()]}$"
        others.append(f"^$|{_outside(found[1])}$")
    while at < len(rest) and len(others) < _MOST:
        if rest[at] == "[" and (found := re.compile(_CLASS).match(rest, at)):
            at = found.end()
        elif at > 1 and rest.startswith(_BEHIND, at):
            end = at + _closing(rest[at:])
            some = _others_than(rest[at + len("(?!") : end])
            if end > at and all(some) and rest[end + 1 : end + 2] not in ("*", "+", "?", "{"):
                others += some
                rest = rest[:at] + rest[end + 1 :]
            else:
                at += 1
        else:
            at += 2 if rest[at] == "\\" else 1
    return rest, others


def _closing(text: str) -> int:
    """Returns the place of the bracket that closes the one at the beginning; -1: there is none."""
    depth, at = 0, 0
    while at < len(text):
        if text[at] == "[" and (found := re.compile(_CLASS).match(text, at)):
            at = found.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
        at += 2 if text[at] == "\\" else 1
    return -1


def _others_than(body: str) -> list[str]:
    """Returns patterns of texts whose beginning matches none of the choices of another pattern; an empty one: it is not
    known."""
    found = _CHOICE.fullmatch(body)
    if found and "[" not in body and "\\|" not in body:
        return [other_than(f"{each}{found[2] or ''}") for each in found[1].split("|")]
    return [other_than(body)]


def other_texts(texts: Sequence[str]) -> str:
    """Returns a regular expression that matches all texts except those given; empty if it would be too long."""
    if max(map(len, texts)) > _MOST_LETTERS or sum(map(len, texts)) > _MOST_CHARS:
        return ""
    return f"^(?:{_behind(sorted(set(texts)), 0)})"


def _behind(texts: Sequence[str], at: int) -> str:
    """Returns what may stand behind the same `at` letters of sorted texts."""
    ways = [] if len(texts[0]) == at else ["$"]
    letters: dict[str, list[str]] = {text[at]: [] for text in texts if len(text) > at}
    for text in texts:
        if len(text) > at:
            letters[text[at]].append(text)
    inside = "".join(f"\\{one}" if one in _MARKS else one for one in letters)
    ways.append(f"[^{inside}]" if letters else "(?:.|\\n)")
    for one, some in letters.items():
        ways.append(f"{chr(92) if one in _MARKS else ''}{one}(?:{_behind(some, at + 1)})")
    return "|".join(ways)


def other_than(body: str) -> str:
    """Returns a regular expression that matches texts whose beginning does not match the expression `body`; empty if
    none is known.
    """
    if found := _REPEATED.fullmatch(body):
        outside = _outside(found[1])
        return outside if found[2] == "*" else f"^$|{outside}"
    if found := _LAST.fullmatch(body):
        return f"^$|{_outside(found[1])}$"
    if found := _TWICE.fullmatch(body) or _DOUBLED.fullmatch(body):
        one, other = found[1], _outside(found[1])
        return f"^(?:{other}|{one}{other})*(?:{one})?$"
    if found := _SOMEWHERE.fullmatch(body):
        return f"^{_outside(found[1])}*$"
    if found := _WORD.fullmatch(body):
        letters = re.findall(_SET, found[1])
        if len(letters) > _MOST_LETTERS:
            return ""
        before = ["".join(letters[:n]) for n in range(len(letters))]
        ways = [f"{word}(?:{_outside(letters[n])}|$)" for n, word in enumerate(before)]
        more = [f"{found[1]}(?:.|\\n)"] if found[2] else []
        return f"^(?:{'|'.join([*ways, *more])})"
    return ""


def _outside(one: str) -> str:
    """Returns the class of all characters but those of a class."""
    if one.startswith("["):
        return "[" + one[2:] if one.startswith("[^") else "[^" + one[1:]
    return f"[^{one}]" if one != "^" else r"[^\^]"
