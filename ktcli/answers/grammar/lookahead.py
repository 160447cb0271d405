r"""Says patterns that begin with lookaheads, which are not compiled, by further patterns without any.

`^(?=x)y` is `^x` and `^y`; `^(?!x)y` is `^y` and a pattern that `^x` does not match. The latter is known for what
schemas have there: a word, a class of characters that is repeated to the end, the end of the text, two in a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ktcli.answers.grammar.meaning import VALUES

_CLASS = r"\[(?:\\.|[^\]\\])+\]"
_ESCAPED = r"\\[dDsSwW]"
_LETTER = r"\\[^\w\s]|[\w\s:@/=_,;!#%&<>~'\"-]"  # what stands for itself
_SET = f"(?:{_CLASS}|{_ESCAPED}|{_LETTER})"
# What is behind `(?!` and a `^` that may repeat the pattern's own, and what matches where it does not.
_REPEATED = re.compile(rf"({_SET})([*+])\$")
_WORD = re.compile(rf"((?:{_SET})+)(\$?)")
_LAST = re.compile(rf"\.\*({_SET})\$")
_TWICE = re.compile(rf"\.\*({_SET})\{{2\}}")
_DOUBLED = re.compile(rf"\.\*({_LETTER})\1")
_SOMEWHERE = re.compile(rf"\.\*({_SET})")
_LOOKAHEAD = re.compile(r"\(\?([=!])")
_MOST = 8  # lookaheads of a pattern
_MOST_CHARS = 2000  # of a pattern: what is done with one is quadratic in them
_MOST_LETTERS = 100  # of a word, each of whose beginnings is written out


def without_lookaheads(schema: Any) -> Any:
    """Returns a schema whose patterns have no lookaheads at their beginnings, where that can be said."""
    if isinstance(schema, list):
        return [without_lookaheads(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: each if key in VALUES else without_lookaheads(each) for key, each in schema.items()
    }
    pattern = found.get("pattern")
    if isinstance(pattern, str) and (parts := _parts(pattern)):
        found["pattern"], *others = parts
        further = found.get("allOf", [])
        if isinstance(further, list):
            found["allOf"] = [*further, *({"pattern": each} for each in others)]
    return found


def _parts(pattern: str) -> list[str]:
    """Returns patterns that a text must match all, in place of one; empty: it has no lookahead, or one that is not
    known."""
    if len(pattern) > _MOST_CHARS:
        return []
    rest, others = pattern.removeprefix("^"), list[str]()
    anchored = rest is not pattern
    while (found := _LOOKAHEAD.match(rest)) and len(others) < _MOST:
        end = _closing(rest)
        body = rest[found.end() : end]
        # Without `^`, a text may match behind its beginning: only what must not be there can be said.
        known = anchored or (found[1] == "!" and body.startswith("^"))
        if end < 0 or not known or _LOOKAHEAD.search(body):
            return []
        other = f"^(?:{body})" if found[1] == "=" else _other_than(body.removeprefix("^"))
        if not other:
            return []
        others.append(other)
        rest = rest[end + 1 :]
    return [f"^{rest}" if anchored else rest, *others] if others else []


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


def _other_than(body: str) -> str:
    """Returns a pattern of texts whose beginning does not match another; empty: it is not known."""
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
