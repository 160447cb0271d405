"""Reads an answer by the response template of the model, which few have."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.answers.calls.values import Tools
from ktcli.answers.events import Added
from ktcli.answers.stream import StopStrings
from ktcli.answers.templates.answers import Answers
from ktcli.answers.templates.parser import AnswerParser
from ktcli.answers.templates.reading import Telling
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
        """The number of calls of tools so far."""
        return self._telling.calls

    @property
    def thinks(self) -> bool:
        """Whether what comes next belongs to a thought."""
        field = self._parser.field
        return field is not None and field.role is FieldRole.THOUGHT

    def feed(self, id: int) -> Added:
        """Returns what an id adds."""
        mark = self._marks.get(id)
        whole = self._detokenizer.feed(id) if mark is None else self._detokenizer.finish() + mark
        events = self._parser.feed(self.stops.feed(whole))
        if self.stops.stopped:
            events += self._parser.finish()
        return self._telling.tell(events)

    def finish(self, *, whole: bool) -> Added:
        """Returns what was held back."""
        if self.stops.stopped:
            return Added("")
        text = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
        events = self._parser.feed(text)
        ending = self._answers.ending(self._parser.field)
        events += self._parser.feed(ending) + self._parser.finish()
        added = self._telling.tell(events)
        return added._replace(text=added.text.removesuffix(ending))
