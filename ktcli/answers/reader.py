"""Reads a model's answer from its ids as they arrive: text, thoughts and tool calls, up to a stop string.

The engine gives every id to `hears` as it is chosen, which says whether the answer ends there; what the id added is
then taken by `next`, one id after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from ktcli.answers.calls.reader import CallReader, Read
from ktcli.answers.calls.styles import CallStyle
from ktcli.answers.calls.values import Tools
from ktcli.answers.channels import CHANNEL, END, FINAL, MESSAGE, START, Channels
from ktcli.answers.events import Added, AnswerPiece, CallEnds, CallEvent, ReadEvent
from ktcli.answers.format import AnswerFormat
from ktcli.answers.stream import ANSWER, THINK, StopStrings, Thinking, ThoughtMarks
from ktcli.text.detokenizer import Detokenizer
from ktcli.text.tokenizer import Tokenizer


class AnswerReader:
    """Turns the ids of one answer into events.

    Args:
        answers: how the model writes answers; None: the prompt is a text that goes on, in which nothing is a thought.
        prompt: the text before it.
        stops: texts that end it.
        budget: the most tokens of its thoughts; None: as many as the model likes.
        tools: what may be called; None: nothing, and calls are not looked for.
        once: whether only the answer's beginning can be a thought, as where its form is fixed.
        continues: whether the answer goes on with words that end the prompt.
        one_call: whether the first call of a tool ends the answer.
    Attributes:
        called: whether it has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: AnswerFormat | None,
        prompt: str = "",
        *,
        stops: Sequence[str] = (),
        budget: int | None = None,
        tools: Tools | None = None,
        once: bool = False,
        continues: bool = False,
        one_call: bool = False,
    ) -> None:
        self._tokenizer, self._budget = tokenizer, budget
        self._one_call, self.called = one_call, False
        self._added: deque[Added] = deque()
        self._form: _WrittenForm
        if answers is None:
            self._form = _Plain(tokenizer, stops)
        elif answers.template is not None:
            # Few models have one, and what reads it is large.
            from ktcli.answers.templates.parser import AnswerParser
            from ktcli.answers.templates.reading import ByTemplate

            parser = AnswerParser(answers.template.template, once=once)
            parser.prime(prompt)
            self._form = ByTemplate(tokenizer, stops, answers.template, parser, tools)
        else:
            style = None if tools is None else answers.calls
            calls = None if style is None or tools is None else CallReader(style, tools)
            if Channels.known_to(tokenizer):
                channels = Channels(tokenizer, prompt, calls=style is not None)
                self._form = _InChannels(stops, channels, calls)
            else:
                inside = prompt.rstrip().endswith(THINK) or (continues and _is_open(prompt))
                thinking = Thinking(inside=inside, once=once)
                self._form = _BetweenMarks(tokenizer, stops, thinking, style, calls)

    @property
    def spent(self) -> bool:
        """Whether the thought budget is used up before the thought has ended: the answer pauses there, and continues
        after the ids of `closing`.
        """
        return self._budget is not None and self._budget <= 0 and self._form.thinks

    def closing(self) -> list[int]:
        """Returns the ids that end the thought, which must be read next; the tokens of later thoughts are not limited
        any more.
        """
        self._budget = None
        return self._tokenizer.encode(self._form.closing)

    @property
    def calls(self) -> int:
        """The number of tool calls that the answer has completed so far."""
        return self._form.calls

    @property
    def stopped(self) -> str:
        """The stop string that ended the answer; empty: none did."""
        return self._form.stops.found

    def hears(self, id: int) -> bool:
        """Reads the next id of the answer; returns whether the answer ends with it, by a stop string or its only call,
        or pauses because its thought budget is used up.
        """
        self._added.append(self._allowed(self._form.feed(id)))
        if self._budget is not None and self._form.thinks:
            self._budget -= 1
        return bool(self.stopped) or self.called or self.spent

    def next(self) -> Added:
        """Returns the text and events that an id added to the answer: at each call those of the next id read by
        `hears`.
        """
        return self._added.popleft()

    def finish(self, *, whole: bool) -> Added:
        """Ends the answer; returns the text and events that were held back.

        Args:
            whole: whether the model itself ended the answer; only then does a complete call in an unclosed thought
                count.
        """
        return Added("") if self.called else self._allowed(self._form.finish(whole=whole))

    def _allowed(self, added: Added) -> Added:
        """Returns what is added without further calls, where there may be one only; notes when that is complete."""
        if not self._one_call:
            return added
        calls = [each for each in added.events if isinstance(each, CallEvent)]
        self.called = self.called or any(isinstance(each, CallEnds) for each in calls)
        first = (each for each in added.events if not (isinstance(each, CallEvent) and each.number))
        return Added(added.text, tuple(first))


class _WrittenForm(Protocol):
    """One way in which models write thoughts, answers and calls."""

    stops: StopStrings
    closing: str  # what ends a thought, so that the answer follows

    @property
    def calls(self) -> int:
        """The number of calls of tools so far."""

    @property
    def thinks(self) -> bool:
        """Whether what comes next belongs to a thought."""

    def feed(self, id: int) -> Added:
        """Returns what an id adds."""

    def finish(self, *, whole: bool) -> Added:
        """Returns what was held back."""


class _Plain:
    """A text that goes on: all of it is text, and control tokens are none of it."""

    closing, calls, thinks = "", 0, False

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stops = StopStrings(stops)
        self._detokenizer = Detokenizer(tokenizer)

    def feed(self, id: int) -> Added:
        return self._added(self.stops.feed(self._detokenizer.feed(id)))

    def finish(self, *, whole: bool) -> Added:
        if self.stops.stopped:
            return Added("")
        return self._added(self.stops.feed(self._detokenizer.finish()) + self.stops.finish())

    @staticmethod
    def _added(text: str) -> Added:
        return Added(text, _pieces([(False, text)]))


class _Shown:
    """What is shown of an answer whose text is told apart from its thoughts: marks are taken out, calls read.

    Args:
        calls: reads calls; None: none are looked for.
    """

    def __init__(self, calls: CallReader | None) -> None:
        self._marks, self._calls = ThoughtMarks(), calls
        self._thought = ""  # the last one, as long as it is not closed, where calls are looked for

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return 0 if self._calls is None else self._calls.calls

    def of(self, pieces: Iterable[AnswerPiece]) -> tuple[ReadEvent, ...]:
        """Returns the events of some pieces."""
        shown = self._marks.without(pieces)
        if self._calls is None:
            return shown
        found: list[ReadEvent] = []
        for piece in shown:
            self._thought = self._thought + piece.text if piece.thought else ""
            found += [piece] if piece.thought else _told(self._calls.feed(piece.text))
        return tuple(found)

    def finish(self, *, whole: bool, thinks: bool) -> tuple[ReadEvent, ...]:
        """Returns what was held back.

        Args:
            whole: see `AnswerReader.finish`.
            thinks: whether a thought was not closed.
        """
        if self._calls is None:
            return ()
        found = _told(self._calls.finish())
        if whole and thinks and not self._calls.calls:
            found += _told(self._calls.whole_calls_in(self._thought))
        return tuple(found)


class _BetweenMarks:
    """Answers of models that put their thoughts between <think> and </think>, which the conversation remembers."""

    closing = f"\n{ANSWER}\n\n"

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        thinking: Thinking,
        style: CallStyle | None,
        calls: CallReader | None,
    ) -> None:
        self.stops = StopStrings(stops)
        self._marks = {} if style is None else _special_marks(tokenizer, style)
        self._opens = () if style is None else style.opens
        self._detokenizer = Detokenizer(tokenizer)
        self._thinking, self._shown = thinking, _Shown(calls)

    @property
    def calls(self) -> int:
        return self._shown.calls

    @property
    def thinks(self) -> bool:
        return self._thinking.inside

    def feed(self, id: int) -> Added:
        mark = self._marks.get(id)
        whole = self._detokenizer.feed(id) if mark is None else self._detokenizer.finish() + mark
        text = self.stops.feed(whole)
        parts: Iterable[tuple[bool, str]] = ()
        if mark is not None and self.thinks and any(each.startswith(mark) for each in self._opens):
            parts = tuple(self._thinking.leave())  # nobody thinks a token that begins a call
        parts = (*parts, *self._thinking.feed(text)) if text else parts
        if self.stops.stopped:
            parts = (*parts, *self._thinking.finish())
        return Added(text, self._shown.of(_pieces(parts)))

    def finish(self, *, whole: bool) -> Added:
        thinks, text, parts = self.thinks, "", tuple[tuple[bool, str], ...]()
        if not self.stops.stopped:
            text = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
            parts = (*self._thinking.feed(text), *self._thinking.finish())
        shown = self._shown.of(_pieces(parts))
        return Added(text, shown + self._shown.finish(whole=whole, thinks=thinks))


class _InChannels:
    """Answers of models that speak in channels, whose thoughts the conversation forgets; stop strings count in the last
    channel only."""

    closing = f"{END}{START}assistant{CHANNEL}{FINAL}{MESSAGE}"

    def __init__(self, stops: Sequence[str], channels: Channels, calls: CallReader | None) -> None:
        self.stops = StopStrings(stops)
        self._channels, self._shown = channels, _Shown(calls)

    @property
    def calls(self) -> int:
        return self._shown.calls

    @property
    def thinks(self) -> bool:
        return self._channels.thinks

    def feed(self, id: int) -> Added:
        thought, text = self._channels.feed(id)
        if thought:
            return Added("", self._shown.of(_pieces([(True, text)])))
        text = self.stops.feed(text)
        return Added(text, self._shown.of(_pieces([(False, text)])))

    def finish(self, *, whole: bool) -> Added:
        thinks, rest, parts = self.thinks, "", list[tuple[bool, str]]()
        if not self.stops.stopped:
            thought, text = self._channels.finish()
            rest = self.stops.feed("" if thought else text) + self.stops.finish()
            parts = [(True, text if thought else ""), (False, rest)]
        shown = self._shown.of(_pieces(parts))
        return Added(rest, shown + self._shown.finish(whole=whole, thinks=thinks))


def _is_open(prompt: str) -> bool:
    """Returns whether a thought was begun in a prompt and not ended."""
    return prompt.rfind(THINK) > prompt.rfind(ANSWER)


def _special_marks(tokenizer: Tokenizer, style: CallStyle) -> dict[int, str]:
    """Returns the special tokens that are part of the marks of calls; elsewhere special tokens are no text."""
    special = (token for token in tokenizer.added if token.special)
    return {
        token.id: token.text for token in special if any(token.text in mark for mark in style.marks)
    }


def _pieces(parts: Iterable[tuple[bool, str]]) -> tuple[AnswerPiece, ...]:
    return tuple(AnswerPiece(text, thought) for thought, text in parts if text)


def _told(read: Iterable[Read]) -> list[ReadEvent]:
    """Returns what a reader of calls read, as events."""
    return [AnswerPiece(each) if isinstance(each, str) else each for each in read]
