"""Maps an answer's fields to events: text for the reader, thoughts, and tool calls.

What is no call after all, a text that cannot be read as the template says, stays a text: nothing of it is lost. What
stands outside all fields, where a template has none for it, is dropped, as the template wants it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ktcli.answers.calls.reader import CallReader, Read
from ktcli.answers.calls.styles import Arguments
from ktcli.answers.calls.values import Tools
from ktcli.answers.events import Added, AnswerPiece, CallArguments, CallBegins, CallEnds
from ktcli.answers.stream import THINK, StopStrings
from ktcli.answers.templates.answers import Answers, calls_of
from ktcli.answers.templates.content import PairReader
from ktcli.answers.templates.parser import AnswerParser, Closes, Event, Opens, Says
from ktcli.answers.templates.template import FieldRole
from ktcli.text.detokenizer import Detokenizer
from ktcli.text.tokenizer import Tokenizer


class ByTemplate:
    """Answers that the model's own template reads. Of thoughts the conversation remembers those between <think> and
    </think>, which chat templates look for in a text.

    Args:
        stops: texts that end the answer.
        parser: that of the template, which has read the prompt's end.
        tools: what may be called; None: nothing.
    Attributes:
        closing: what ends a thought, so that the answer follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        answers: Answers,
        parser: AnswerParser,
        tools: Tools | None,
    ) -> None:
        self.stops = StopStrings(stops)
        self.closing = f"\n{closed}\n\n" if (closed := answers.thought[1]) else ""
        self._marks = {**answers.marks, **(answers.call_marks if tools is not None else {})}
        self._detokenizer = Detokenizer(tokenizer)
        self._answers, self._parser = answers, parser
        self._telling = Telling(answers, tools)

    @property
    def calls(self) -> int:
        """The number of tool calls that the answer has completed so far."""
        return self._telling.calls

    @property
    def thinks(self) -> bool:
        """Whether the answer's next text belongs to a thought."""
        field = self._parser.field
        return field is not None and field.role is FieldRole.THOUGHT

    def feed(self, id: int) -> Added:
        """Reads the next id of the answer; returns the text and the events that it adds."""
        mark = self._marks.get(id)
        whole = self._detokenizer.feed(id) if mark is None else self._detokenizer.finish() + mark
        events = self._parser.feed(self.stops.feed(whole))
        if self.stops.stopped:
            events += self._parser.finish()
        return self._telling.tell(events)

    def finish(self, *, whole: bool) -> Added:
        """Ends the answer; returns the text and the events that were held back."""
        if self.stops.stopped:
            return Added("")
        text = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
        events = self._parser.feed(text)
        ending = self._answers.ending(self._parser.field)
        events += self._parser.feed(ending) + self._parser.finish()
        added = self._telling.tell(events)
        return added._replace(text=added.text.removesuffix(ending))


class Telling:
    """Turns the parser's events of one answer into answer events.

    Args:
        tools: what may be called; None: nothing, and calls are a text.
    Attributes:
        calls: the calls so far.
    """

    def __init__(self, answers: Answers, tools: Tools | None) -> None:
        self._answers, self._tools = answers, tools
        thought, answer = map(answers.template.field, (FieldRole.THOUGHT, FieldRole.ANSWER))
        self._thoughts = _Blanks(strip=thought is None or thought.content.strip)
        self._answer = _Blanks(strip=answer is None or answer.content.strip)
        self._keeps = thought is not None and answers.thought[0] == THINK
        self._reader: CallReader | None = None
        self._pairs: _PairTelling | None = None
        self._raw: list[str] = []  # of a call that is not through
        self._begun: set[FieldRole] = set()  # roles of fields of text that have begun
        self.calls = 0

    def tell(self, events: Iterable[Event]) -> Added:
        """Returns what events of the template's parser add to the answer: the text that the conversation remembers, and
        the events to show (pieces of text, thoughts, tool calls).
        """
        said, pieces = [], list[Read | AnswerPiece]()
        for event in events:
            role = FieldRole.OTHER if event.field is None else event.field.role
            if role is FieldRole.THOUGHT:
                said += [event.text] if self._keeps else []
                text = self._thoughts.feed(self._text(event))
                pieces += [AnswerPiece(text, thought=True)] if text else []
            elif role is FieldRole.ANSWER:
                text = self._text(event)
                said.append(text)
                pieces.append(text)
            elif role is FieldRole.CALLS:
                said.append(event.text)
                pieces += [event.text] if self._tools is None else self._called(event, self._tools)
        return Added("".join(said), self._pieces(pieces))

    def _pieces(self, read: list[Read | AnswerPiece]) -> tuple[AnswerPiece | Any, ...]:
        found = []
        for each in read:
            if not isinstance(each, str):
                found.append(each)
            elif text := self._answer.feed(each):
                found.append(AnswerPiece(text))
        return tuple(found)

    def _text(self, event: Event) -> str:
        """Returns the text that an event says; what joins fields of text stands before the next of them."""
        if not isinstance(event, Opens):
            return event.text if isinstance(event, Says) else ""
        role, join = event.field.role, event.field.join or ""
        before = join if role in self._begun else ""
        self._begun.add(role)
        return before

    # --- calls --------------------------------------------------------------------------------

    def _called(self, event: Event, tools: Tools) -> list[Read]:
        """Returns what an event says of calls; arguments in plain JSON and in pairs are told as they come."""
        if isinstance(event, Opens):
            return self._call(event, tools)
        if self._pairs is not None:
            read = self._pairs.feed(event.text) if isinstance(event, Says) else self._pairs.finish()
            self.calls += isinstance(event, Closes)
            return read
        if self._reader is not None:
            found = self._reader.feed(event.text)
            if isinstance(event, Closes):
                found += self._reader.finish()
            self.calls = self._reader.calls
            return found
        self._raw.append(event.text)
        return self._whole(event, tools) if isinstance(event, Closes) else []

    def _call(self, event: Opens, tools: Tools) -> list[Read]:
        """Returns what the mark says that begins a call."""
        self._raw, self._reader, self._pairs = [event.text], None, None
        style, content = self._answers.style, event.field.content
        if style is not None and content.is_plain_json and style.arguments is not Arguments.PAIRS:
            self._reader = CallReader(style, tools)
            self._reader.calls = self.calls
            return self._reader.feed(event.text)
        if name := event.field.called(event.groups):
            self._pairs = _PairTelling(PairReader(content), tools, self.calls, name)
            return [CallBegins(self.calls, name)]
        return []

    def _whole(self, event: Closes, tools: Tools) -> list[Read]:
        found: list[Read] = []
        try:
            rows = calls_of(event.field.value(event.body, event.groups))
            calls = [(row["name"], row["id"], _arguments(row, tools)) for row in rows]
        except (ValueError, RecursionError):
            return ["".join(self._raw)]
        for name, id, arguments in calls:
            found.append(CallBegins(self.calls, name, id))
            found += [CallArguments(self.calls, arguments), CallEnds(self.calls)]
            self.calls += 1
        return found


class _PairTelling:
    """Tells the arguments of a call in pairs as they come, as the text of an object."""

    def __init__(self, reader: PairReader, tools: Tools, number: int, name: str) -> None:
        self._reader, self._tools, self._number, self._name = reader, tools, number, name
        self._lead, self._failed = "{", False

    def feed(self, text: str) -> list[Read]:
        """Returns what a piece of the call says."""
        return self._told(lambda: self._reader.feed(text))

    def finish(self) -> list[Read]:
        """Returns the rest of it; a call that is not whole ends where it does."""
        last = self._told(self._reader.finish)
        end = "{}" if self._lead == "{" else "}"
        return [*last, CallArguments(self._number, end), CallEnds(self._number)]

    def _told(self, read: Callable[[], list[tuple[str, Any]]]) -> list[Read]:
        """Returns the pairs as pieces of JSON; behind one that means nothing there are no more."""
        found: list[Read] = []
        try:
            for key, value in [] if self._failed else read():
                said = _typed(value, self._tools, self._name, key)
                found.append(CallArguments(self._number, f"{self._lead}{json.dumps(key)}: {said}"))
                self._lead = ", "
        except (ValueError, RecursionError):
            self._failed = True
        return found


def _typed(value: Any, tools: Tools, name: str, key: str) -> str:
    """Returns a value as JSON; a text gets the type that the tool's schema says.

    Raises:
        ValueError: JSON has no such value.
    """
    typed = tools.typed(name, key, value) if isinstance(value, str) else value
    return json.dumps(typed, ensure_ascii=False, allow_nan=False)


def _arguments(call: Mapping[str, Any], tools: Tools) -> str:
    """Returns the arguments of a call, as JSON; texts get the types that the tool's schema says.

    Raises:
        ValueError: they are none.
    """
    given = call.get("arguments", call.get("parameters"))
    if isinstance(given, str):
        return given
    if given is None:
        return "{}"
    if not isinstance(given, Mapping):
        raise ValueError("the arguments are not an object")
    pairs = (
        f"{json.dumps(key)}: {_typed(value, tools, call['name'], key)}"
        for key, value in given.items()
    )
    return f"{{{', '.join(pairs)}}}"


class _Blanks:
    """Takes the blanks at the beginning and end of a text that comes in pieces.

    Args:
        strip: whether it does.
    """

    def __init__(self, *, strip: bool) -> None:
        self._strip = strip
        self._held, self._begun = "", False

    def feed(self, text: str) -> str:
        """Returns what is surely not the end's blanks."""
        if not self._strip:
            return text
        whole = self._held + text
        if not self._begun:
            whole = whole.lstrip()
        said = whole.rstrip()
        self._held, self._begun = whole[len(said) :], self._begun or bool(said)
        return said
