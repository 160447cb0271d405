"""Chooses the drafts of one conversation, and learns from its steps how many are worth their cost.

    drafting.begin(prompt)
    ids = drafting.next(waiting, most, beside)  # before a step
    drafting.ran(rows, beside, seconds)         # after it
    drafting.said(id)                           # each id of the answer, as it is chosen

A step computes the last id with a draft behind it, and the sampler takes the rows in turn as if each had come from a
step of its own. It draws the same numbers and sees the same history, so an answer is the same with drafts and without.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.engine.contract import Engine
from ktcli.engine.draft import Draft, DraftSource, Lookup
from ktcli.engine.draft_length import (
    MOST_ROWS,
    Acceptance,
    Account,
    Question,
    StepTimes,
    best_length,
)
from ktcli.errors import UsageError
from ktcli.planner.memory import MOST_DRAFTED
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The options for drafts.

    Attributes:
        drafts: whether anything is.
        length: the ids of every draft; None: as many as pay.
        asked: whether somebody asked for it, who then is told if it cannot be.
    """

    drafts: bool = True
    length: int | None = None
    asked: bool = False

    @classmethod
    def parse(cls, text: str | None, name: str) -> DraftOptions:
        """Returns the options for drafts that a text stands for: "off", "lookup", or the number of ids of every draft;
        None: the defaults.

        Args:
            text: the value of a command's option or a variable.
            name: the name of that option or variable, for the error.
        Raises:
            UsageError: the text is none of off, lookup, and 1 to MOST_DRAFTED.
        """
        if text is None:
            return cls()
        numbers = [str(n) for n in range(1, MOST_DRAFTED + 1)]
        if text not in ("off", "lookup", *numbers):
            raise UsageError(
                f"{name} must be off, lookup, or 1 to {MOST_DRAFTED}, not {text[:30]!r}"
            )
        return cls(text != "off", int(text) if text in numbers else None, asked=True)

    def of(self, engine: Engine) -> Drafting | None:
        """Returns the object that chooses the drafts of a new conversation on an engine; None: nothing is drafted.

        Raises:
            UsageError: somebody asked for drafts where they could change answers.
        """
        if not self.drafts:
            return None
        times = engine.step_times
        if times is not None:
            return Drafting(
                Lookup(), times, length=self.length, repeats=engine.pools.states is not None
            )
        if self.asked:
            raise cannot_draft()
        return None


def cannot_draft() -> UsageError:
    """Returns the error to raise where drafts are asked for on an engine on which they could change answers."""
    return UsageError(
        "drafted tokens could change answers here: on a GPU, and in AMX tiles of bf16, logits depend"
        " on how many tokens share a step",
        hint="leave out --draft (and the setting draft unset), or use --draft off",
    )


NO_DRAFTS = DraftOptions(drafts=False)


class Drafting:
    """Chooses the drafts of one conversation, and updates its estimates with each step.

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
        self._step: tuple[int, int, float] | None = None  # rows, those beside, seconds of the last
        self._said = 0  # ids since then

    def begin(self, ids: Sequence[int]) -> None:
        """Starts an answer to the prompt `ids`: the guesses of what follows are based on these ids."""
        self._settle()
        self._guess = Draft()
        self._source.follow(ids)

    def next(self, waiting: int, most: int, beside: int = 0) -> tuple[int, ...]:
        """Returns the drafted ids that the next step should try after the last known id; (): none.

        Args:
            waiting: the number of known ids that the step computes beside the last one.
            most: the most drafted ids that there is room for.
            beside: the number of rows of other conversations in that step.
        """
        self._settle()
        guess = self._source.draft(MOST_DRAFTED)
        if not self._guess.ids:
            self._guess, self._right = guess, 0
        most = min(most, len(guess.ids), MOST_ROWS - 1 - waiting - beside)
        if most < 1:
            return ()
        if self._length is not None:
            return guess.ids[: min(most, self._length)]
        if not beside and self._times.needs_plain:
            return ()
        chances = self._acceptance.chances(guess.kind, most)
        may_cost = self._account.may_cost(self._times.seconds(beside + 1))
        question = Question(chances, waiting, self._repeats, may_cost, beside)
        return guess.ids[: best_length(question, self._times)]

    def ran(self, rows: int, beside: int, seconds: float) -> None:
        """Records a step that computed `rows` rows of this conversation and `beside` rows of others in `seconds`."""
        self._step, self._said = (rows, beside, seconds), 0

    def said(self, id: int) -> None:
        """Appends an id of the answer to the conversation, and counts whether the current guess predicted it."""
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
            rows, beside, seconds = self._step
            plain = self._times.seconds(beside + 1)
            self._account.add(self._said, seconds, plain, drafted=rows > 1)
            self._step = None
