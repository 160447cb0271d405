"""Other information in a model's response template: markers, and the style of its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any

from ktcli.answers.calls.styles import Arguments, CallStyle
from ktcli.answers.templates.parser import AnswerParser, Closes, Event, Says
from ktcli.answers.templates.patterns import Pattern
from ktcli.answers.templates.template import AnswerTemplate, Field, FieldRole
from ktcli.records import dataclass
from ktcli.text.tokenizer import Tokenizer

# Of a call that is written to see whether it is read.
_TOOL, _KEY, _VALUE = "get_weather", "city", "Paris"


@dataclass(frozen=True, slots=True)
class Answers:
    """The parsing of a model's answers by the answer template in its files.

    Attributes:
        style: the style of calls that the template reads; calls are held to it. None: none is known.
        marks: the special tokens that are part of the marks of fields; elsewhere they are no text.
        call_marks: the same, of the marks of calls.
        endings: the special tokens that end answers, as texts: a mark may have one, which the engine does not give.
    """

    template: AnswerTemplate
    style: CallStyle | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    call_marks: Mapping[int, str] = field(default_factory=dict)
    endings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        template: AnswerTemplate,
        tokenizer: Tokenizer,
        stop_ids: Collection[int],
        known: CallStyle | None,
    ) -> Answers:
        """Returns the parsing of a model's answers by its answer template and its tokenizer's special and stop tokens.

        Args:
            known: the style of tool calls found in the model's chat template; None: none.
        """
        special = [token for token in tokenizer.added if token.special]
        calls = template.field(FieldRole.CALLS)
        others = [word for each in template.fields if each is not calls for word in each.words]
        called = [] if calls is None else calls.words
        return cls(
            template,
            _style(template, known),
            {token.id: token.text for token in special if _is_in(token.text, others)},
            {token.id: token.text for token in special if _is_in(token.text, called)},
            tuple(token.text for token in special if token.id in stop_ids and token.text),
        )

    @property
    def has_thoughts(self) -> bool:
        """Whether the answer template has a field for thoughts, apart from the text for the user."""
        return self.template.field(FieldRole.THOUGHT) is not None

    @property
    def has_calls(self) -> bool:
        """Whether the answer template has a field for tool calls."""
        return self.template.field(FieldRole.CALLS) is not None

    @property
    def thought(self) -> tuple[str, str]:
        """The (opening, closing) texts around a thought; both empty if the template has no thoughts, or no example text
        for both of their marks.
        """
        return _around(self.template.field(FieldRole.THOUGHT))

    @property
    def answer(self) -> tuple[str, str]:
        """The (opening, closing) texts around the text for the user; both empty if that text needs no marks, or there
        is no example text for both.
        """
        found = self.template.field(FieldRole.ANSWER)
        return _around(found) if found is not self.template.rest else ("", "")

    def ending(self, last: Field | None) -> str:
        """Returns the text of the stop token that closes the field `last`, which the engine does not pass on; empty if
        no stop token closes it.
        """
        words = () if last is None or last is self.template.rest else last.words
        return next((text for text in self.endings if _is_in(text, words)), "")


def _around(found: Field | None) -> tuple[str, str]:
    opened, closed = (_example(found.opens), _example(found.closes)) if found else ("", "")
    return (opened, closed) if opened and closed else ("", "")


def _example(pattern: Pattern | None) -> str:
    return (pattern.example or "") if pattern is not None else ""


def _is_in(text: str, words: Collection[str]) -> bool:
    """Returns whether a text is part of some words, which may have escapes."""
    return any(text in word or text in re.sub(r"\\(.)", r"\1", word) for word in words)


# --- calls ------------------------------------------------------------------------------------------


def calls_of(value: Any) -> list[Mapping[str, Any]]:
    """Returns the functions that a decoded JSON value calls, one call or a list of them: each a dict with its `name`,
    its `id` (empty if it has none) and its other keys, such as `arguments`.

    Raises:
        ValueError: something in it is not a call.
    """
    found: list[Mapping[str, Any]] = []
    for row in value if isinstance(value, list) else [value]:
        function = row.get("function") if isinstance(row, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError("the value is not a call")
        id = row.get("id")
        found.append({**function, "id": id if isinstance(id, str) else ""})
    return found


def _style(template: AnswerTemplate, known: CallStyle | None) -> CallStyle | None:
    """Returns the style of calls that a template reads: the one that is known, or JSON between its own marks."""
    calls = template.field(FieldRole.CALLS)
    if calls is None or template.rest is not template.field(FieldRole.ANSWER):
        return None
    opened, closed = _around(calls)
    own = CallStyle("its template", (), Arguments.OBJECT, opened, closed) if opened else None
    return next(
        (each for each in (known, own) if each is not None and _reads(template, each)), None
    )


def _reads(template: AnswerTemplate, style: CallStyle) -> bool:
    """Returns whether a template reads a call that is written in a style, and nothing beside it."""
    parser = AnswerParser(template)
    events = [*parser.feed(_written(style)), *parser.finish()]
    if any(isinstance(event, Says) and _is_other(event) for event in events):
        return False
    try:
        found = [call for event in events for call in _calls_in(event)]
    except ValueError:
        return False
    return [(call["name"], call.get("arguments")) for call in found] == [(_TOOL, {_KEY: _VALUE})]


def _calls_in(event: Event) -> list[Mapping[str, Any]]:
    if not isinstance(event, Closes) or event.field.role is not FieldRole.CALLS:
        return []
    return calls_of(event.field.value(event.body, event.groups))


def _is_other(event: Says) -> bool:
    return bool(event.text.strip()) and (
        event.field is None or event.field.role is not FieldRole.CALLS
    )


def _written(style: CallStyle) -> str:
    """Returns a call, as a style has it."""
    opened, closed = style.section
    begin = "" if style.bare else style.begin
    if style.arguments is Arguments.OBJECT:
        name, key = style.keys
        call = json.dumps({name: _TOOL, key: {_KEY: _VALUE}})
        whole = f"{begin}\n{call}\n{style.end}" if style.end else f"{begin}[{call}]"
        return f"{opened}{whole if not style.bare else call}{closed}"
    head = f"{begin}{style.prefix}{_TOOL}{':0' if style.indexed else ''}{style.name_end}"
    if style.arguments is Arguments.JSON:
        body = f"{style.fence[0]}{json.dumps({_KEY: _VALUE})}{style.fence[1]}"
    else:
        said = ' string="true"' if style.typed else ""
        value = f"{style.value[0]}{_VALUE}{style.value_end(_KEY)}"
        body = f"\n{style.key[0]}{_KEY}{style.key[1]}{said}{'' if said else chr(10) * bool(style.value[0])}{value}\n"
    return f"{opened}\n{head}{body}{style.end}\n{closed}" if opened else f"{head}{body}{style.end}"
