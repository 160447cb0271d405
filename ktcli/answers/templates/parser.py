"""Parses answers by their template as they arrive: assigns each piece to a field, and finds where fields begin and
end.

However the text is cut, the fields are the same in the end: those that transformers finds in the whole text. What may
still be part of a mark is held back until it is known.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ktcli.answers.templates.patterns import Match
from ktcli.answers.templates.search import Search
from ktcli.answers.templates.template import AnswerTemplate, Field

# Characters that are looked at together, so that little of them is read again behind a mark.
_SLICE = 64
_AGAIN = 1 << 18  # characters that may be read again in all, a second's work; then no mark counts


class Opens(NamedTuple):
    """A field begins.

    Attributes:
        text: the mark, as far as it is part of the answer and not of the prompt.
        groups: the named groups of the mark.
    """

    field: Field
    text: str
    groups: dict[str, str]


class Says(NamedTuple):
    """A piece of a field's text; the field is None for text outside all fields."""

    field: Field | None
    text: str


class Closes(NamedTuple):
    """A field ends.

    Attributes:
        text: the mark, as far as it is part of the answer; empty: there is none.
        groups: those of the mark that opened the field.
        body: the whole text of the field, with what the prompt had of it.
    """

    field: Field
    text: str
    groups: dict[str, str]
    body: str


Event = Opens | Says | Closes
_Kind = Literal["open", "close"]


class AnswerParser:
    """An incremental parser of one answer by an answer template.

    Args:
        once: whether no field begins any more behind the first letter of the one that is outside all others, as where
            the form of an answer is fixed.
    """

    def __init__(self, template: AnswerTemplate, *, once: bool = False) -> None:
        self._template, self._once = template, once
        self._text, self._at = "", 0  # what is not read yet, and its place
        self._before = ""  # the letter before that
        self._origin = 0  # the place where the prompt ends
        self._field = template.rest
        self._open = False  # whether the field is open
        self._begun = False  # whether the answer has a letter outside all fields
        self._groups: dict[str, str] = {}
        self._body: list[str] = []
        self._empty_at = -1  # the place of the last mark that was empty
        self._again = 0
        self._events: list[Event] = []
        self._watch()

    @property
    def field(self) -> Field | None:
        """The field to which the answer's next character belongs, if no mark begins with it; None if it belongs to no
        field.
        """
        return self._field

    def prime(self, prompt: str) -> None:
        """Parses the part of the answer that is in the prompt; to be called before anything else."""
        begun = self._template.begun(prompt)
        self._origin = len(begun)
        self.feed(begun)

    def feed(self, text: str) -> list[Event]:
        """Adds a piece of the answer; returns the events that are certain with it: fields that open and close, and
        pieces of their text.
        """
        for at in range(0, len(text), _SLICE):
            self._text += text[at : at + _SLICE]
            self._read(ended=False)
        return self._told()

    def finish(self) -> list[Event]:
        """Ends the answer, and a field that is open; returns the events that were held back: fields that open and
        close, and pieces of their text.
        """
        self._read(ended=True)
        self._close("")
        return self._told()

    def _told(self) -> list[Event]:
        found, self._events = self._events, []
        return found

    # --- marks --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Begins to look for the marks that count from here on."""
        rest, marks = self._template.rest, []
        if self._field is not rest or (self._once and self._begun) or self._again > _AGAIN:
            marks = [("close", self._field, self._field.closes)] if self._field else []
        else:
            marks = [("open", field, field.opens) for field in self._template.fields]
            marks += [("close", rest, rest.closes)] if rest is not None else []
        self._searches: list[tuple[_Kind, Field, Search]] = [
            (kind, field, Search(mark, self._at, self._before))  # type: ignore[misc]
            for kind, field, mark in marks
            if mark is not None and self._again <= _AGAIN
        ]

    def _read(self, *, ended: bool) -> None:
        """Reads on as far as is certain."""
        while True:
            for _, _, search in self._searches:
                search.take(self._text, search.at - self._at)
                if ended:
                    search.finish()
            end = self._at + len(self._text)
            hold = min((each.hold for _, _, each in self._searches if not each.done), default=end)
            found = [
                (match.start, match.start - match.end, kind != "open", field.name, field, match)
                for kind, field, search in self._searches
                if search.done and (match := search.match) is not None
            ]
            best = min(found, key=lambda each: each[:4], default=None)
            if best is None or (not ended and best[0] >= hold):
                break
            if not self._pass(best[4], best[5], opens=not best[2]):
                return
        begun = self._begun
        self._say(end if ended else hold)
        if self._once and self._begun > begun:
            self._watch()

    def _pass(self, field: Field, match: Match, *, opens: bool) -> bool:
        """Goes on behind a mark; returns whether there is more to read."""
        begun = self._begun
        self._say(match.start)
        if self._once and self._begun > begun:
            self._watch()
            return True
        if match.start == match.end == self._empty_at:  # nothing can be between two that are empty
            if not self._text:
                return False
            self._say(self._at + 1)
            self._watch()
            return True
        if match.start == match.end:
            self._empty_at = match.end
        read = max((search.at for _, _, search in self._searches), default=match.end)
        self._again += read - match.end
        groups = {}
        if opens and field.opens is not None:
            groups = field.opens.groups(match, self._between)
        mark = self._taken(match.end)
        self._close("" if opens else mark)
        if opens:
            self._field, self._open, self._groups = field, True, groups
            self._events.append(Opens(field, mark, groups))
        self._watch()
        return True

    def _between(self, start: int, end: int) -> str:
        return self._text[start - self._at : end - self._at]

    # --- text ---------------------------------------------------------------------------------

    def _taken(self, end: int) -> str:
        """Takes the text up to a place; returns what of it is no part of the prompt."""
        if end <= self._at:
            return ""
        taken, fresh = self._between(self._at, end), self._between(max(self._at, self._origin), end)
        self._text, self._at, self._before = self._text[len(taken) :], end, taken[-1]
        return fresh

    def _say(self, end: int) -> None:
        """Gives the text up to a place to the field."""
        if end <= self._at:
            return
        body = self._between(self._at, end)
        fresh, field = self._taken(end), self._field
        if field is not None:
            if not self._open:
                self._open = True
                self._events.append(Opens(field, "", {}))
            self._begun = self._begun or (field is self._template.rest and not body.isspace())
            self._body.append(body)
        if fresh:
            self._events.append(Says(field, fresh))

    def _close(self, mark: str) -> None:
        if self._open and self._field is not None:
            body = "".join(self._body)
            self._events.append(Closes(self._field, mark, self._groups, body))
        elif mark:
            self._events.append(Says(None, mark))
        self._field, self._open = self._template.rest, False
        self._groups, self._body = {}, []
