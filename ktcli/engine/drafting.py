"""The drafts of one conversation: what to try in its next step, and what its steps have taught.

    drafting.begin(prompt)
    ids = drafting.next(waiting, most)      # before a step
    drafting.ran(rows, seconds)             # after it
    drafting.said(id)                       # each id of the answer, as it is chosen

A step computes the last id with a draft behind it, and the sampler takes the rows in turn as if each had come from a
step of its own. It draws the same numbers and sees the same history, so an answer is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.engine.draft import Draft, DraftSource
from ktcli.engine.draft_length import (
    MOST_ROWS,
    Acceptance,
    Account,
    Question,
    StepTimes,
    best_length,
)
from ktcli.planner.memory import MOST_DRAFTED


class Drafting:
    """Drafts for one conversation.

    Args:
        source: guesses what comes next.
        times: the times of the engine's steps, which all its conversations share and measure.
        length: the ids of every draft; None: as many as pay.
        repeats: whether some layer keeps a state, see `Question.repeats`.
    """

    def __init__(
        self,
        source: DraftSource,
        times: StepTimes,
        *,
        length: int | None = None,
        repeats: bool = False,
    ) -> None:
        self._source, self._times = source, times
        self._length, self._repeats = length, repeats
        self._acceptance = Acceptance(source.kinds)
        self._account = Account()
        self._guess, self._right = Draft(), 0  # the guess that is compared with what is said
        self._step: tuple[int, float] | None = None  # rows and seconds of the last one
        self._said = 0  # ids since then

    def begin(self, ids: Sequence[int]) -> None:
        """An answer to the prompt `ids` begins."""
        self._settle()
        self._guess = Draft()
        self._source.follow(ids)

    def next(self, waiting: int, most: int) -> tuple[int, ...]:
        """The ids to try in the next step.

        Args:
            waiting: the rows that it computes again.
            most: the most ids that there is room for.
        """
        self._settle()
        guess = self._source.draft(MOST_DRAFTED)
        if not self._guess.ids:
            self._guess, self._right = guess, 0
        most = min(most, len(guess.ids), MOST_ROWS - 1 - waiting)
        if most < 1:
            return ()
        if self._length is not None:
            return guess.ids[: min(most, self._length)]
        chances = self._acceptance.chances(guess.kind, most)
        may_cost = self._account.may_cost(self._times.seconds(1))
        question = Question(chances, waiting, self._repeats, may_cost)
        return guess.ids[: best_length(question, self._times)]

    def ran(self, rows: int, seconds: float) -> None:
        """The step of so many rows is over."""
        self._times.add(rows, seconds)
        self._step, self._said = (rows, seconds), 0

    def said(self, id: int) -> None:
        """The answer goes on with `id`."""
        self._source.extend(id)
        self._said += 1
        guess, place = self._guess, self._right
        if not guess.ids:
            return
        right = guess.ids[place] == id
        self._acceptance.count(guess.kind, place, right)
        self._right += 1
        if not right or self._right == len(guess.ids):
            self._guess = Draft()

    def _settle(self) -> None:
        """Enters the last step into the account, now that it is known how many ids it gave."""
        if self._step is not None:
            rows, seconds = self._step
            self._account.add(self._said, seconds, self._times.seconds(1), drafted=rows > 1)
            self._step = None
