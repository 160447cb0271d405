"""Turns a rendered conversation into ids, with the ids of answers as they were generated.

A model need not cut its own text the way the tokenizer would, and other ids mean other cache pages. So wherever the
rendered text has an answer at its place, letter by letter, the answer's own ids stand for it, and only the stretches
between answers are encoded. That is safe where a stretch begins with a special token: only there a text surely ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.records import dataclass
from ktcli.text.control import ControlTokens, Marked
from ktcli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer as its model generated it: text and ids.

    Attributes:
        at: the characters of the rendered conversation before it.
        ids: the ids that the model generated; a tokenizer may cut the text into others.
    """

    at: int
    text: str
    ids: tuple[int, ...]


def remember(spoken: list[Spoken], answer: Spoken) -> None:
    """Adds an answer to the list `spoken`, ordered by place in the text (`at`), after dropping the answers at its place
    or later.
    """
    while spoken and spoken[-1].at >= answer.at:
        spoken.pop()
    spoken.append(answer)


class Splicer:
    """Encodes the prompts of one conversation as it grows; known stretches keep their ids."""

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens) -> None:
        self._tokenizer, self._control = tokenizer, control
        self._known: dict[Marked, list[int]] = {}

    def ids(
        self, rendered: Marked, spoken: Sequence[Spoken], most: int, *, passing: bool = False
    ) -> list[int] | None:
        """Returns the token ids of a rendered conversation, in which earlier answers keep the ids that were generated;
        None if they are certainly more than `most`.

        Args:
            spoken: the answers, in the order of their places in the text; those that are not there are ignored.
            passing: whether this prompt is only tried, so that the ids of its parts are not remembered for the next
                one.
        """
        answers = _present(rendered.text, spoken)
        known = self._known
        while True:
            cuts = [0]
            for answer in answers:
                cuts += [answer.at, answer.at + len(answer.text)]
            stretches = rendered.parts(cuts)[::2]
            room, fresh = most - sum(len(answer.ids) for answer in answers), {}
            for stretch in stretches:
                found = known.get(stretch)
                if found is None:
                    if self._control.exceeds(stretch, max(0, room)):
                        return None
                    found = self._control.encode(stretch)
                fresh[stretch] = found
                room -= len(found)
            known = {**known, **fresh}
            sure = self._sure(answers, [fresh[stretch] for stretch in stretches])
            if len(sure) == len(answers):
                break
            answers = sure
        if not passing:
            self._known = fresh
        ids = list(fresh[stretches[0]])
        for answer, stretch in zip(answers, stretches[1:], strict=True):
            ids += (*answer.ids, *fresh[stretch])
        return ids

    def _sure(self, answers: list[Spoken], stretches: list[list[int]]) -> list[Spoken]:
        """Returns the answers behind which a special token begins."""
        special = self._tokenizer.special_ids
        behind = zip(answers, stretches[1:], strict=True)
        return [answer for answer, stretch in behind if stretch and stretch[0] in special]

    def is_whole(self, answer: Spoken, *, foreign: bool = False) -> bool:
        """Returns whether the ids of an answer decode to all of its text.

        Args:
            foreign: whether the ids come from a file, which could name control tokens or ids that do not exist.
        """
        if foreign and not all(self._tokenizer.is_text(id) for id in answer.ids):
            return False
        return self._tokenizer.decode(answer.ids) == answer.text


def _present(text: str, spoken: Sequence[Spoken]) -> list[Spoken]:
    """Returns the answers that are at their places in a text, one after the other."""
    found: list[Spoken] = []
    end = 0
    for answer in spoken:
        if answer.text and answer.at >= end and text.startswith(answer.text, answer.at):
            found.append(answer)
            end = answer.at + len(answer.text)
    return found
