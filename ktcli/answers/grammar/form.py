"""The form of an answer's text as requested by a client: JSON of a schema, a regular expression, a grammar."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from ktcli.answers.grammar.distinct import Held, held_arrays, without_unique
from ktcli.answers.grammar.schema import SCHEMA_BYTES, checked_schema
from ktcli.errors import UsageError
from ktcli.records import dataclass

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
    """The notations in which a form of answers can be given."""

    SCHEMA = "JSON schema"
    CHOICE = "list of strings"
    REGEX = "regular expression"
    GBNF = "GBNF grammar"  # or Lark's: which of both is seen in it


@dataclass(frozen=True, slots=True)
class Form:
    """The form that a text must have, as the request gives it; nothing of it is checked before `part`.

    Attributes:
        said: the schema, as an object or as JSON; the texts; the expression or the grammar.
        field: what errors call it.
    """

    notation: Notation
    said: Any
    field: str

    @classmethod
    def of_schema(cls, schema: Any, field: str) -> Form:
        """Returns the form of a JSON text that fits a JSON schema; `field` is the form's name in error messages."""
        return cls(Notation.SCHEMA, schema, field)

    @classmethod
    def of_object(cls, field: str) -> Form:
        """Returns the form of a text that is any JSON object; `field` is the form's name in error messages."""
        return cls(Notation.SCHEMA, {"type": "object"}, field)

    def part(self, name: str) -> Part:
        """Returns the form as one of llguidance's grammars: a dict with its `name` and its `lark_grammar` or
        `json_schema`.

        Raises:
            UsageError: the form is not valid in its notation, or beyond a limit.
        """
        if self.notation is Notation.SCHEMA:
            return schema_part(without_unique(self._schema()), name)
        said = self._choice() if self.notation is Notation.CHOICE else self.said
        if not isinstance(said, str) or not said:
            raise UsageError(f"{self.field} is not a {self.notation.value}: it must be a string")
        size = len(said.encode("utf-8", "replace"))
        if size > GRAMMAR_BYTES:
            raise UsageError(f"{self.field} has {size:,} bytes; the limit is {GRAMMAR_BYTES:,}")
        return {"name": name, "lark_grammar": self._lark(said)}

    @property
    def held(self) -> Held:
        """The arrays that must have unique items, which the grammar cannot express: by the name of the property that
        holds the array ("*": any, "": none), the JSON texts that its items may be (None: not listed).

        Raises:
            UsageError: the schema is invalid, or beyond a limit.
        """
        if self.notation is not Notation.SCHEMA or "uniqueItems" not in str(self.said):
            return {}
        return held_arrays(self._schema(), self.field)

    def _schema(self) -> dict[str, Any]:
        said = _read(self.said, self.field) if isinstance(self.said, str) else self.said
        return checked_schema(said, self.field)

    def _choice(self) -> str:
        texts = self.said
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise UsageError(f"{self.field} is not a {self.notation.value}")
        return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"

    def _lark(self, said: str) -> str:
        if self.notation is Notation.REGEX:
            from llguidance import LLMatcher

            made = json.loads(LLMatcher.grammar_from_regex(said))
            return str(made["grammars"][0]["lark_grammar"])
        if self.notation is not Notation.GBNF:
            return said
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(said)
        except Exception as error:  # the library's own, of many kinds
            why = " ".join(str(error).split())[:150]
            raise UsageError(f"{self.field} is not a {self.notation.value}: {why}") from error


def _read(text: str, field: str) -> Any:
    if len(text) > 4 * SCHEMA_BYTES:  # blanks and all
        raise UsageError(f"{field} has {len(text):,} characters; the limit is {4 * SCHEMA_BYTES:,}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:100]
        raise UsageError(f"{field} is not valid JSON: {why}") from error


def schema_part(schema: dict[str, Any], name: str) -> Part:
    """Returns one of llguidance's grammars, a dict with `name` and `json_schema`, of the JSON texts that fit a checked
    schema.
    """
    return {"name": name, "json_schema": {**schema, "x-guidance": _JSON}}


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on one answer: the form of its text, and where the answer begins.

    Attributes:
        form: what its text must be, behind its thoughts.
        prompt: the text before the answer.
        said: the ids of the answer that are there already.
    """

    form: Form
    prompt: str
    said: tuple[int, ...] = ()
