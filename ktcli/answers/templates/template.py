"""Reads response templates, which define how a checkpoint writes its answers, as hostile input.

The format is that of `response_template` in tokenizer_config.json, as transformers, vLLM and SGLang read it: fields
between marks, at most one of them without a mark that opens it, which is all the text outside the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ktcli.answers.templates.content import (
    STREAMED,
    FieldContent,
    check_shape,
    read_content,
    shaped,
    value_of,
)
from ktcli.answers.templates.patterns import Pattern
from ktcli.answers.templates.search import Finder
from ktcli.records import dataclass

TEMPLATE_CHARS = 65_536  # as JSON; published ones have about 1,000
FIELDS = 16  # published ones have 3
LITERALS = 16  # in the place of one
# At the end of a prompt, in which a pattern for the start of the answer is looked for.
ANCHOR_CHARS = 8192
PREFIX_CHARS = 65_536  # of an answer that the prompt may begin
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}


class FieldRole(Enum):
    """The roles of fields, by their names."""

    THOUGHT = ("reasoning_content", "reasoning", "thinking")
    ANSWER = ("content",)
    CALLS = ("tool_calls",)
    OTHER = ()

    @classmethod
    def of(cls, name: str) -> FieldRole:
        """Returns the role of a template's field by its name: thoughts, answer, tool calls, or other."""
        return next((role for role in cls if name in role.value), cls.OTHER)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One field of an answer.

    Attributes:
        opens: the mark that opens it; None: it is what stands outside all others.
        closes: the mark that closes it; None: it goes on to the end.
        repeats: whether it may come several times; else the last counts.
        join: what stands between its texts if it comes again; None: they are a list.
        shape: what is made of its value, and of the groups of the mark that opened it; None: nothing.
        each: whether that is made of each of a list of values.
        words: the texts and patterns of its marks, and of those in its text, with every escape.
    """

    name: str
    role: FieldRole
    content: FieldContent
    opens: Pattern | None = None
    closes: Pattern | None = None
    repeats: bool = False
    join: str | None = None
    shape: Any = None
    each: bool = False
    words: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether the field's text as it stands is its value, as for a text or a number, and is not JSON or pairs to be
        parsed.
        """
        return self.content.kind in STREAMED

    def called(self, groups: Mapping[str, str]) -> str:
        """Returns the name of the tool that the field calls, if its text is the pairs of a call's arguments; else an
        empty text. `groups` are the named groups of the mark that opened the field.
        """
        function = self.shape.get("function") if isinstance(self.shape, dict) else None
        match function:
            case {"name": str(name), "arguments": "{content}", **more} if not more:
                pairs = self.content.kind == "xml-inline" and not self.content.merge
                return groups.get(name[1:-1], "") if pairs and not self.each else ""
        return ""

    def value(self, body: str, groups: Mapping[str, str]) -> Any:
        """Returns the value of the field's text: parsed by its content type, and put into the shape that its
        `transform` gives.

        Args:
            body: the whole text of the field.
            groups: the named groups of the mark that opened it.
        Raises:
            ValueError: the text is not of its content type, or a placeholder of `transform` has no value.
        """
        value = value_of(body, self.content)
        if self.shape is None:
            return value
        if not self.each:
            return shaped(self.shape, {**groups, "content": value})
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise ValueError("the text is not a list of objects")
        return [shaped(self.shape, {**groups, **each}) for each in value]


@dataclass(frozen=True, slots=True, eq=False)
class AnswerTemplate:
    """The fields and marks of a model's answers, as its files declare them.

    Attributes:
        rest: the field that is what stands outside all others; None: that is nothing.
        start: the mark behind which an answer begins in a prompt; its last place counts.
        starts: the same as texts; empty: it is a pattern.
    """

    fields: tuple[Field, ...]
    rest: Field | None
    start: Pattern
    starts: tuple[str, ...] = ()

    def field(self, role: FieldRole) -> Field | None:
        """Returns the first field with this role; None if the template has none."""
        return next((field for field in self.fields if field.role is role), None)

    def begun(self, prompt: str) -> str:
        """Returns the part of the answer that a prompt already has at its end, behind the template's start mark; empty
        if there is no such mark, or more than 65,536 characters follow it.
        """
        if self.starts:
            end = max(
                (at + len(text) if (at := prompt.rfind(text)) >= 0 else -1) for text in self.starts
            )
        else:
            tail = prompt[-ANCHOR_CHARS:]
            finder = Finder(self.start)
            try:
                found = [*finder.feed(tail), *finder.finish()]
            except ValueError:
                found = []
            end = len(prompt) - len(tail) + found[-1].end if found else -1
        begun = prompt[end:] if end >= 0 else ""
        return begun if len(begun) <= PREFIX_CHARS else ""


def read_template(value: Any) -> AnswerTemplate:
    """Returns the answer template in a decoded `response_template` of a model's files.

    Raises:
        ValueError: the template is invalid, beyond a limit, or asks for something unsupported; the message says what.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if len(json.dumps(value)) > TEMPLATE_CHARS:
        raise ValueError(f"it has more than {TEMPLATE_CHARS:,} characters")
    if value.get("version", 1) != 1:
        raise ValueError(f"its version is {str(value['version'])[:20]!r}, not 1")
    _check_keys("it", value, _KEYS)
    given = value.get("fields")
    if not isinstance(value.get("defaults", {}), dict) or not isinstance(given, dict):
        raise ValueError("its defaults or fields are not an object")
    if not 0 < len(given) <= FIELDS:
        raise ValueError(f"it has {len(given)} fields, not 1 to {FIELDS}")
    fields = tuple(_read_field(name, each) for name, each in given.items())
    rests = [field for field in fields if field.opens is None]
    if len(rests) > 1:
        raise ValueError("more than one of its fields has no opening mark")
    start, starts = _mark("it", value, "start_anchor")
    if start is None:
        raise ValueError("it has no start_anchor")
    template = AnswerTemplate(fields, rests[0] if rests else None, start, starts)
    if (answer := template.field(FieldRole.ANSWER)) is None or not answer.streams:
        raise ValueError("it has no field 'content' that is a string")
    return template


def _check_keys(what: str, value: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{what} has {unknown[0][:40]!r}, which is not a known key")


def _read_field(name: str, value: Any) -> Field:
    what = f"its field {name[:40]!r}"
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    _check_keys(what, value, _FIELD_KEYS)
    opens, _ = _mark(what, value, "open")
    closes, _ = _mark(what, value, "close")
    join, shape = value.get("join"), value.get("transform")
    each = value.get("transform_each", False)
    if join is not None and not (isinstance(join, str) and value.get("repeats")):
        raise ValueError(f"{what} has a join that is not a string, or does not repeat")
    if not isinstance(each, bool) or (each and shape is None):
        raise ValueError(f"{what} has a transform_each without a transform")
    named = [mark for mark in (opens, closes) if mark is not None and mark.names]
    if named and shape is None:
        raise ValueError(f"{what} has named groups and no transform that uses them")
    try:
        check_shape(shape)
        content = read_content(value.get("content", "text"), value.get("content_args", {}))
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None
    args = _texts_in(value.get("content_args", {}))
    words = (*(word for key in ("open", "close") for word in _words(value, key)), *args)
    repeats = bool(value.get("repeats", False))
    return Field(
        name, FieldRole.of(name), content, opens, closes, repeats, join, shape, each, words
    )


def _mark(what: str, value: Mapping[str, Any], key: str) -> tuple[Pattern | None, tuple[str, ...]]:
    """Returns the mark under a key, as texts or as a pattern, and the texts."""
    pattern = f"{key}_pattern"
    if key in value and pattern in value:
        raise ValueError(f"{what} has both {key} and {pattern}")
    texts = value.get(key, [])
    texts = [texts] if isinstance(texts, str) else texts
    try:
        if pattern in value:
            if not isinstance(value[pattern], str):
                raise ValueError("is not a string")
            return Pattern(value[pattern]), ()
        if key not in value:
            return None, ()
        known = isinstance(texts, list) and 0 < len(texts) <= LITERALS
        if not known or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"is neither a string nor a list of 1 to {LITERALS} strings")
        return Pattern.of(texts), tuple(texts)
    except ValueError as error:
        raise ValueError(f"{what} has {key}, which {error}") from None


def _texts_in(value: Any) -> tuple[str, ...]:
    """Returns all texts in nested plain values."""
    if isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        return tuple(text for part in parts for text in _texts_in(part))
    return (value,) if isinstance(value, str) else ()


def _words(value: Mapping[str, Any], key: str) -> list[str]:
    texts = value.get(key, value.get(f"{key}_pattern", ""))
    return [texts] if isinstance(texts, str) else list(texts)
