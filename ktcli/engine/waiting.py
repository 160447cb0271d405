"""The queue in front of a scheduler: bounded, by priority, fair between callers, and without starvation."""

from __future__ import annotations

from collections.abc import Collection

from ktcli.engine.request import Answer
from ktcli.errors import QueueFull

# Steps after which a request that waits counts as one level of priority higher: about ten seconds of answers. So of
# 20 levels, the lowest waits for newer ones no longer than a few minutes.
AGING_STEPS = 256


class Turns:
    """Orders answers for the next step: those in progress, the highest priority, the caller that was served longest
    ago, then age.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # of each caller, when it was last served
        self._served = 0

    def first(self, answers: Collection[Answer], step: int) -> list[Answer]:
        """Returns the answers sorted by their turn at this step, the next one first: those that continue an answer,
        then by priority, which rises by 1 with every 256 steps of waiting, then by how long ago their caller was
        served, then by age.
        """
        return sorted(answers, key=lambda answer: self._rank(answer, step))

    def served(self, answer: Answer) -> None:
        """Records that the caller of this answer was served now, so that other callers of equal priority come first."""
        self._served += 1
        self._last[answer.request.caller] = self._served

    def forget(self, but: Collection[Answer]) -> None:
        """Drops the records of when callers were served, except for the callers of the answers `but`."""
        here = {answer.request.caller for answer in but}
        self._last = {caller: turn for caller, turn in self._last.items() if caller in here}

    def _rank(self, answer: Answer, step: int) -> tuple[bool, int, int, int]:
        risen = (step - answer.since) // AGING_STEPS
        turn = self._last.get(answer.request.caller, 0)
        return not answer.goes_on, -answer.request.priority - risen, turn, answer.number


def require_room(waiting: int, limit: int) -> None:
    """Raises QueueFull if the number of requests that wait, `waiting`, has reached `limit`.

    Raises:
        QueueFull: no further request may wait.
    """
    if waiting >= limit:
        raise QueueFull(waiting, limit)
