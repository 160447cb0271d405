"""Writes grammars in Lark's notation for llguidance: texts, special tokens and rules, each rule once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from ktcli.answers.grammar.form import Part, schema_part
from ktcli.text.tokenizer import Tokenizer

ANY = "(?s:.*)"  # any text, as a regular expression
_LINE = "NL"


class GrammarWriter:
    """Collects the rules of one grammar, and the grammars that they name.

    Args:
        tokenizer: tells which words are special tokens: those are no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {token.text: token.id for token in tokenizer.added if token.special}
        self._special, self._added = special, tokenizer.added
        words = sorted((re.escape(word) for word in special if word), key=len, reverse=True)
        self._words = re.compile("|".join(words)) if words else None
        self._rules: dict[str, str] = {_LINE: r'"\n"'}
        self._parts: list[Part] = []

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule to the grammar, in place of an earlier one of its name and options; returns its name."""
        self._rules[f"{name}{options}"] = body
        return name

    def part(self, part: Part) -> str:
        """Adds another of llguidance's grammars, beside the rules; returns the reference to it, "@" and its name."""
        self._parts.append(part)
        return f"@{part['name']}"

    def schema(self, schema: dict[str, object], name: str) -> str:
        """Adds a grammar of the JSON texts that fit a checked schema; returns the reference to it, "@" and its name."""
        return self.part(schema_part(schema, name))

    def special(self, word: str) -> str:
        """Returns the grammar symbol of a special token, `<[id]>`; empty if the tokenizer has none of this text."""
        id = self._special.get(word)
        return "" if id is None else f"<[{id}]>"

    def token(self, word: str) -> str:
        """Returns the grammar symbol of an added token, special or not, `<[id]>`; empty if the tokenizer has none of
        this text.
        """
        id = next((token.id for token in self._added if token.text == word), None)
        return "" if id is None else f"<[{id}]>"

    def opening(self, mark: str) -> str:
        """Returns the grammar symbols for a mark that is an added token or begins with a special one; empty if the
        mark is encoded as ordinary text.
        """
        spelled = self.text(mark)
        return self.token(mark) or (spelled if spelled.startswith("<[") else "")

    def text(self, text: str) -> str:
        """Returns the grammar symbols that match a text, special tokens in it as `<[id]>`; empty for an empty text."""
        return " ".join(each for each, _ in self._pieces(text))

    def until(self, mark: str, name: str, but: str = "") -> str:
        """Adds rules, whose names begin with `name`, for any text up to and with `mark`; before that, the text holds
        neither the mark nor, if no special token is in the mark, `but`. Returns the name of the rule to use.
        """
        pieces = self._pieces(mark)
        if all(plain for _, plain in pieces):
            if not self._is_plain(but):
                return self.rule(name, f"/{ANY}/", f"[suffix={_quoted(mark)}]")
            end = _escaped(mark)
            rest = f"~/{ANY}{end}(?s:.+)/ & ~/{ANY}{_escaped(but)}{ANY}/"
            return self.rule(name.upper(), f"/{ANY}{end}/ & {rest}")
        first, plain = pieces[0]
        before = json.loads(first) if plain else ""
        rest_ = " ".join(each for each, _ in (pieces[1:] if plain else pieces))
        # Special tokens are never part of a text, so it ends before the first.
        self.rule(name.upper(), f"/{ANY}{_escaped(before)}/" if before else "/(?s:.+)/")
        return self.rule(name, f"{name.upper()}{'' if before else '?'} {rest_}")

    def without(self, marks: Iterable[str], name: str) -> str:
        """Adds a rule for any text of at least one letter that holds none of the given marks; returns its name."""
        plain = [f" & ~/{ANY}{_escaped(mark)}{ANY}/" for mark in marks if self._is_plain(mark)]
        return self.rule(name, f"/(?s:.+)/{''.join(plain)}")

    def _is_plain(self, mark: str) -> bool:
        """Returns whether a mark can be part of a text: special tokens cannot."""
        return bool(mark) and all(plain for _, plain in self._pieces(mark))

    def whole(self, start: str) -> str:
        """Returns the finished grammar as JSON text in llguidance's format; `start` is the body of its first rule."""
        rules = "\n".join(f"{name}: {body}" for name, body in self._rules.items())
        first = {"lark_grammar": f"start: {start}\n{rules}\n"}
        return json.dumps({"grammars": [first, *self._parts]})

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        """Returns the parts of a text as Lark has them, and whether each is plain text."""
        found, at = [], 0
        for match in self._words.finditer(text) if self._words else ():
            if match.start() > at:
                found.append((_quoted(text[at : match.start()]), True))
            found.append((self.special(match[0]), False))
            at = match.end()
        return [*found, (_quoted(text[at:]), True)] if at < len(text) else found


def optional_line() -> str:
    """Returns the grammar symbol that matches a newline or nothing."""
    return f"{_LINE}?"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
