"""Turns the ids of an answer into text as they come: whole characters, thoughts apart, nothing past a stop string.

The engine gives every id to `hears` as it is chosen, which says whether the answer ends there; what the id added is
then taken by `next`, one id after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ktcli.chat.answers.answers import Answers
from ktcli.chat.answers.parser import AnswerParser
from ktcli.chat.answers.reading import Telling
from ktcli.chat.answers.template import FieldRole
from ktcli.chat.calls.styles import CallStyle
from ktcli.chat.calls.values import Tools
from ktcli.chat.channels import CHANNEL, END, FINAL, MESSAGE, START, Channels
from ktcli.chat.pieces import Added, AnswerPiece
from ktcli.chat.stream import ANSWER, THINK, Detokenizer, StopStrings, Thinking
from ktcli.chat.tokenizer import Tokenizer


class _Reading(Protocol):
    """One way in which models write thoughts and answers."""

    stops: StopStrings
    closing: str  # what ends a thought, so that the answer follows

    @property
    def calls(self) -> int:
        """The calls of tools so far, if they are read here."""

    @property
    def thinks(self) -> bool:
        """Tells whether what comes next belongs to a thought."""

    def feed(self, id: int) -> Added:
        """What an id adds."""

    def finish(self) -> Added:
        """What was held back."""


class Transcript:
    """The text of one answer.

    Args:
        stops: texts that end it.
        prompt: the text before it.
        budget: the most tokens of its thoughts; None: as many as the model likes.
        calls: the way in which the model calls tools, whose marks are then part of the text; None: nobody offers any.
        once: whether only the answer's beginning can be a thought, as where its form is fixed.
        answers: how the model's own template reads its answers, calls of tools included; None: it has none.
        tools: what may be called, where a template reads the answer; None: nothing.
        continues: whether the answer goes on with words that end the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        prompt: str,
        budget: int | None = None,
        calls: CallStyle | None = None,
        *,
        once: bool = False,
        answers: Answers | None = None,
        tools: Tools | None = None,
        continues: bool = False,
    ) -> None:
        self._reading: _Reading
        if answers is not None:
            parser = AnswerParser(answers.template, once=once)
            parser.prime(prompt)
            self._reading = _ByTemplate(tokenizer, stops, answers, parser, tools)
        elif Channels.known_to(tokenizer):
            self._reading = _InChannels(tokenizer, stops, prompt, calls=calls is not None)
        else:
            marks = {} if calls is None else _special_marks(tokenizer, calls)
            opens = () if calls is None else calls.opens
            inside = prompt.rstrip().endswith(THINK) or (continues and _is_open(prompt))
            thinking = Thinking(inside=inside, once=once)
            self._reading = _BetweenMarks(tokenizer, stops, thinking, marks, opens)
        self._tokenizer, self._budget = tokenizer, budget
        self._added: deque[Added] = deque()

    @property
    def spent(self) -> bool:
        """Tells whether the thoughts have had their tokens and are not at their end: the answer pauses there, and goes
        on behind `closing`."""
        return self._budget is not None and self._budget <= 0 and self._reading.thinks

    def closing(self) -> list[int]:
        """The ids that end the thought, to be heard next; thoughts behind them are not counted any more."""
        self._budget = None
        return self._tokenizer.encode(self._reading.closing)

    @property
    def calls(self) -> int:
        """The calls of tools so far, where a template reads the answer."""
        return self._reading.calls

    @property
    def thinks(self) -> bool:
        """Tells whether what comes next belongs to a thought."""
        return self._reading.thinks

    @property
    def stopped(self) -> str:
        """The stop string that has come; empty: none has."""
        return self._reading.stops.found

    def hears(self, id: int) -> bool:
        """The next id; returns whether the answer ends, or pauses, with it."""
        self._added.append(self._reading.feed(id))
        if self._budget is not None and self._reading.thinks:
            self._budget -= 1
        return bool(self.stopped) or self.spent

    def next(self) -> Added:
        """What the first id added that was not taken yet."""
        return self._added.popleft()

    def finish(self) -> Added:
        """What was held back; no id follows."""
        return Added("", ()) if self.stopped else self._reading.finish()


class _BetweenMarks:
    """Answers of models that put their thoughts between <think> and </think>, which the conversation remembers."""

    closing, calls = f"\n{ANSWER}\n\n", 0

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        thinking: Thinking,
        marks: Mapping[int, str],
        opens: Sequence[str],
    ) -> None:
        self.stops = StopStrings(stops)
        self._marks, self._opens = marks, opens
        self._detokenizer = Detokenizer(tokenizer)
        self._thinking = thinking

    @property
    def thinks(self) -> bool:
        return self._thinking.inside

    def feed(self, id: int) -> Added:
        mark = self._marks.get(id)
        whole = self._detokenizer.feed(id) if mark is None else self._detokenizer.finish() + mark
        text = self.stops.feed(whole)
        shown: Iterable[tuple[bool, str]] = ()
        if mark is not None and self.thinks and any(each.startswith(mark) for each in self._opens):
            shown = tuple(self._thinking.leave())  # nobody thinks a token that begins a call
        shown = (*shown, *self._thinking.feed(text)) if text else shown
        if self.stops.stopped:
            shown = (*shown, *self._thinking.finish())
        return Added(text, _pieces(shown))

    def finish(self) -> Added:
        text = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
        return Added(text, _pieces((*self._thinking.feed(text), *self._thinking.finish())))


class _InChannels:
    """Answers of models that speak in channels, whose thoughts the conversation forgets; stop strings count in the last
    channel only."""

    closing = f"{END}{START}assistant{CHANNEL}{FINAL}{MESSAGE}"
    calls = 0

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], prompt: str, *, calls: bool
    ) -> None:
        self.stops = StopStrings(stops)
        self._channels = Channels(tokenizer, prompt, calls=calls)

    @property
    def thinks(self) -> bool:
        return self._channels.thinks

    def feed(self, id: int) -> Added:
        thought, text = self._channels.feed(id)
        if thought:
            return Added("", _pieces([(True, text)]))
        text = self.stops.feed(text)
        return Added(text, _pieces([(False, text)]))

    def finish(self) -> Added:
        thought, text = self._channels.finish()
        rest = self.stops.feed("" if thought else text) + self.stops.finish()
        return Added(rest, _pieces([(True, text if thought else ""), (False, rest)]))


class _ByTemplate:
    """Answers that the model's own template reads. Of thoughts the conversation remembers those between <think> and
    </think>, which chat templates look for in a text."""

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
        return self._telling.calls

    @property
    def thinks(self) -> bool:
        field = self._parser.field
        return field is not None and field.role is FieldRole.THOUGHT

    def feed(self, id: int) -> Added:
        mark = self._marks.get(id)
        whole = self._detokenizer.feed(id) if mark is None else self._detokenizer.finish() + mark
        events = self._parser.feed(self.stops.feed(whole))
        if self.stops.stopped:
            events += self._parser.finish()
        return self._telling.tell(events)

    def finish(self) -> Added:
        text = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
        events = self._parser.feed(text)
        ending = self._answers.ending(self._parser.field)
        events += self._parser.feed(ending) + self._parser.finish()
        added = self._telling.tell(events)
        return added._replace(text=added.text.removesuffix(ending))


def _is_open(prompt: str) -> bool:
    """Tells whether a thought was begun in a prompt and not ended."""
    return prompt.rfind(THINK) > prompt.rfind(ANSWER)


def _special_marks(tokenizer: Tokenizer, style: CallStyle) -> dict[int, str]:
    """The special tokens that are part of the marks of calls; elsewhere special tokens are no text."""
    special = (token for token in tokenizer.added if token.special)
    return {
        token.id: token.text for token in special if any(token.text in mark for mark in style.marks)
    }


def _pieces(parts: Iterable[tuple[bool, str]]) -> tuple[AnswerPiece, ...]:
    return tuple(AnswerPiece(text, thought) for thought, text in parts if text)
