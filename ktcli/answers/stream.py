"""Separates thoughts from answers in a text as it arrives, and ends it at a stop string, wherever tokens are split.

`StopStrings` holds back what could become a stop string. `Thinking` tells the model's thoughts from its answer, and
`ThoughtMarks` takes the marks around thoughts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field

from ktcli.answers.events import AnswerPiece
from ktcli.records import dataclass

THINK, ANSWER = "<think>", "</think>"


class StopStrings:
    """A filter that passes text on until a stop string appears, wherever tokens are cut.

    The first to be complete ends the text, even inside a longer one that began before it; of several that are
    complete with the same character the longest is cut off.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = ""  # the stop string that has appeared

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return bool(self.found)

    def feed(self, text: str) -> str:
        """Adds a piece of text; returns the text, held back or new, that is certainly not part of a stop string. After
        a stop string nothing is returned any more.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops]
        found = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if found:
            _, start, self.found = min(found)
            passed, self._held = self._held[:start], ""
            return passed
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """Ends the text; returns what was held back because it could have become a stop string."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins, all of `stop` aside; 0 if none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


@dataclass(slots=True)
class Thinking:
    """Splits text into pairs (is it a thought, piece); tags belong to the thought.

    Attributes:
        inside: whether the next character is part of a thought.
        once: whether nothing is a thought any more behind the first one, or the first letter outside.
    """

    inside: bool = False
    once: bool = False
    _held: str = field(default="", repr=False)
    _over: bool = field(default=False, repr=False)

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yields the pieces of `text` in order as pairs (whether it is a thought, piece); an end that may be part of a
        tag is held back.
        """
        rest = self._held + text
        if self.once and not self.inside and not THINK.startswith(rest[: len(THINK)]):
            self._over = True
        while not self._over:
            tag = ANSWER if self.inside else THINK
            at = rest.find(tag)
            if at < 0:
                break
            cut = at + len(tag) if self.inside else at
            if cut:
                yield self.inside, rest[:cut]
            rest = rest[cut:]
            if not self.inside:
                yield True, THINK
                rest = rest[len(THINK) :]
            self._over = self.once and self.inside
            self.inside = not self.inside
        keep = 0 if self._over else overlap(rest, tag)
        if len(rest) > keep:
            yield self.inside, rest[: len(rest) - keep]
        self._held = rest[len(rest) - keep :]

    def leave(self) -> Iterator[tuple[bool, str]]:
        """Ends a thought that was not closed; yields the text that was held back, as a pair (whether it is a thought,
        text).
        """
        yield from self.finish()
        self._over, self.inside = self._over or self.once, False

    def finish(self) -> Iterator[tuple[bool, str]]:
        """Yields the text that was held back, if there is any, as a pair (whether it is a thought, text)."""
        if self._held:
            yield self.inside, self._held
        self._held = ""


class ThoughtMarks:
    """A filter that removes the marks of thoughts, and the blank lines around them, from the pieces of an answer."""

    def __init__(self) -> None:
        self._begun = False  # whether the thought has a letter
        self._earlier = False  # whether one before it had
        self._spoken = False  # whether the text has a letter
        self._blank = ""  # its end, if that is blank
        self._behind = False  # whether the next letter is the first behind a thought

    def without(self, pieces: Iterable[AnswerPiece]) -> tuple[AnswerPiece, ...]:
        """Returns the next pieces of an answer without the marks of thoughts and the blank lines around them; pieces
        that become empty are dropped.
        """
        found = [
            (self._thought(text) if thought else self._answer(text), thought)
            for text, thought in pieces
        ]
        return tuple(AnswerPiece(text, thought) for text, thought in found if text)

    def _thought(self, text: str) -> str:
        whole = self._blank + text.removeprefix(THINK).removesuffix(ANSWER)
        if not self._begun:
            whole = whole.lstrip()
        said = whole.rstrip()
        self._blank, self._behind = whole[len(said) :], True
        if said and not self._begun:
            self._begun = True
            return f"\n\n{said}" if self._earlier else said
        return said

    def _answer(self, text: str) -> str:
        said = text.lstrip("\n") if self._behind and not self._spoken else text
        if said:
            self._earlier, self._spoken = self._earlier or self._begun, True
            self._begun = self._behind = False
            self._blank = ""
        return said
