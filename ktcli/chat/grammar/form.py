"""What an answer's text must be, as clients and people say it: JSON of a schema, a regular expression, a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ktcli.chat.grammar.schema import checked_schema
from ktcli.errors import UsageError

GRAMMAR_BYTES = 64 << 10
# Blanks where JSON allows any: a weak model would write them for ever.
BLANKS = r"[ ]{1,2}|\n[ \t]{0,16}"
_JSON = {
    "whitespace_pattern": BLANKS,
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
Part = dict[str, Any]  # one of the grammars that llguidance takes together


class Notation(Enum):
    """The ways to say what a text must be."""

    SCHEMA = "JSON schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"
    GBNF = "GBNF grammar"


@dataclass(frozen=True, slots=True)
class Form:
    """What a text must be.

    Attributes:
        text: the schema as JSON, the expression, or the grammar.
        field: what errors call it.
    """

    notation: Notation
    text: str
    field: str

    @classmethod
    def of_schema(cls, schema: Any, field: str) -> Form:
        """JSON of a schema.

        Raises:
            UsageError: it is no schema, or beyond a limit.
        """
        return cls(Notation.SCHEMA, json.dumps(checked_schema(schema, field)), field)

    @classmethod
    def of_schema_text(cls, text: str, field: str) -> Form:
        """JSON of a schema that is written as JSON.

        Raises:
            UsageError: it is no JSON, no schema, or beyond a limit.
        """
        try:
            return cls.of_schema(json.loads(text), field)
        except (ValueError, RecursionError) as error:
            why = " ".join(str(error).split())[:100]
            raise UsageError(f"{field} is no JSON schema: it is not JSON: {why}") from error

    @classmethod
    def of_object(cls, field: str) -> Form:
        """Any JSON object."""
        return cls.of_schema({"type": "object"}, field)

    @classmethod
    def of_choice(cls, texts: Any, field: str) -> Form:
        """One of some texts.

        Raises:
            UsageError: they are none, or beyond a limit.
        """
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise UsageError(f"{field} is no list of texts")
        rules = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls.of_grammar(Notation.LARK, f"start: {rules}", field)

    @classmethod
    def of_grammar(cls, notation: Notation, text: Any, field: str) -> Form:
        """A regular expression, or a grammar.

        Raises:
            UsageError: it is no text, or beyond a limit.
        """
        if not isinstance(text, str) or not text:
            raise UsageError(f"{field} is no {notation.value}: a text is needed")
        size = len(text.encode("utf-8", "replace"))
        if size > GRAMMAR_BYTES:
            raise UsageError(f"{field} has {size:,} bytes, it can have {GRAMMAR_BYTES:,}")
        return cls(notation, text, field)

    def part(self, name: str) -> Part:
        """The form as one of llguidance's grammars.

        Raises:
            UsageError: GBNF that cannot be read.
        """
        if self.notation is Notation.SCHEMA:
            return schema_part(json.loads(self.text), name)
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if self.notation is Notation.REGEX:
            made = LLMatcher.grammar_from_regex(self.text)
            return {**json.loads(made)["grammars"][0], "name": name}
        if self.notation is Notation.LARK:
            return {"name": name, "lark_grammar": self.text}
        try:
            return {"name": name, "lark_grammar": any_to_lark(self.text)}
        except Exception as error:  # the library's own, of many kinds
            why = " ".join(str(error).split())[:150]
            raise UsageError(f"{self.field} is no GBNF grammar: {why}") from error


def schema_part(schema: dict[str, Any], name: str) -> Part:
    """JSON of a checked schema as one of llguidance's grammars."""
    return {"name": name, "json_schema": {**schema, "x-guidance": _JSON}}
