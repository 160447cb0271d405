"""Chooses how many tokens to draft: the number with the most tokens per second, by measured acceptance and times.

All of it is arithmetic on numbers that are given: nothing here runs a model or reads a clock. How often guesses are
right is counted also while nothing is drafted, as a guess that was never computed can be compared with what was said.
What drafts may cost is bounded by an account: when they have lost a hundredth of the time, they pause until that is
a smaller share again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from math import prod

from ktcli.planner.memory import MOST_DRAFTED
from ktcli.records import dataclass

# The most rows of a step: the token that is sure, a draft, and where layers keep states the tokens that were right in
# the draft before, which are computed again.
MOST_ROWS = 2 * MOST_DRAFTED + 1

_WORTH = 1.02  # a draft must be expected to be faster by this factor: the expectation has errors of its own
_TRIED = 2  # ids of a draft that is made to learn what it takes
_TRIED_CHANCE = 0.5  # that all of them are right, at least
_SAMPLES = 9  # steps whose median is the time of a number of rows
_PLAIN_SAMPLES = 3  # steps of one row that are measured before anything is drafted
_PLAIN_EVERY = 64  # and then one of so many is such a step
_STALE = 512  # steps after which a time that was never measured again is not believed any more
_FADING = 0.97  # the weight of what was counted, with each guess after it
_PRIOR_GUESSES = 3.0  # the guesses that the assumed chance counts for
_LOST_SHARE = 0.01  # of the time that the same answer would have taken without drafts
_CREDIT_STEPS = 2.0  # plain steps that may be lost before anything was gained
_SAVED_STEPS = 16.0  # plain steps of what was gained that may be lost again


@dataclass(slots=True)
class _Share:
    """A share that is counted, the older the lighter."""

    prior: float
    right: float = 0.0
    all: float = 0.0

    def count(self, right: bool) -> None:
        self.right = self.right * _FADING + right
        self.all = self.all * _FADING + 1

    @property
    def value(self) -> float:
        return (self.right + self.prior * _PRIOR_GUESSES) / (self.all + _PRIOR_GUESSES)


class Acceptance:
    """The acceptance rates of one conversation's guesses, for each kind of guess.

    The first id of a guess is counted apart from those after it: once a guess began well, it mostly goes on well.

    Args:
        priors: the assumed chance of each kind.
    """

    def __init__(self, priors: Sequence[float]) -> None:
        self._first = [_Share(prior) for prior in priors]
        self._later = [_Share(prior) for prior in priors]

    def count(self, kind: int, place: int, right: bool) -> None:
        """Counts whether the drafted id at index `place` of a guess of this kind was right; all ids before it in the
        guess were.
        """
        (self._later if place else self._first)[kind].count(right)

    def chances(self, kind: int, most: int) -> list[float]:
        """Returns, for each of the first `most` ids of a guess of this kind, the estimated probability that it is right
        if those before it are.
        """
        return [(self._later if place else self._first)[kind].value for place in range(most)]


class StepTimes:
    """The seconds of a decode step by its number of rows: medians of the engine's own steps, and modelled ones where
    there are none.

    Args:
        prior: the modelled seconds of steps of 1, 2, … rows; only their ratios count once one was measured.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = tuple(prior)
        self._samples: list[deque[float]] = [deque(maxlen=_SAMPLES) for _ in prior]
        self._medians: list[float | None] = [None] * len(self._prior)  # made when asked for
        self._measured_at = [0] * len(self._prior)
        self._steps = 0

    def __len__(self) -> int:
        return len(self._prior)

    def add(self, rows: int, seconds: float) -> None:
        """Records that a decode step of `rows` rows took `seconds`; numbers of rows not modelled are ignored."""
        self._steps += 1
        if not 1 <= rows <= len(self._prior):
            return
        i = rows - 1
        if i and self._steps - self._measured_at[i] > _STALE:
            self._samples[i].clear()
        self._samples[i].append(seconds)
        self._medians[i] = None
        self._measured_at[i] = self._steps

    def seconds(self, rows: int) -> float:
        """Returns the expected seconds of a decode step of `rows` rows; for more rows than were modelled, those of the
        largest modelled number.
        """
        i = min(rows, len(self._prior)) - 1
        known = self._known(i)
        if known is not None:
            return known
        below = next((j for j in range(i - 1, -1, -1) if self._known(j) is not None), None)
        above = next(
            (j for j in range(i + 1, len(self._prior)) if self._known(j) is not None), None
        )
        return self._prior[i] * self._factor(i, below, above)

    def at_most(self, rows: int) -> float:
        """Returns an upper bound of the seconds of a decode step of `rows` rows: each row beyond the largest measured
        step may take as long as a step of one row.
        """
        last = min(rows, len(self._prior)) - 1
        known = next((i for i in range(last, -1, -1) if self._known(i) is not None), 0)
        return max(self.seconds(rows), self.seconds(known + 1) + (last - known) * self.seconds(1))

    @property
    def needs_plain(self) -> bool:
        """Whether the next step should be one of a single row, without a draft, so that its time is measured: fewer
        than 3 such steps were measured, or none within the last 64 steps.
        """
        return (
            len(self._samples[0]) < _PLAIN_SAMPLES
            or self._steps - self._measured_at[0] > _PLAIN_EVERY
        )

    @property
    def is_unknown(self) -> bool:
        """Whether neither a step of 2 rows nor one of 3 was measured within the last 512 steps."""
        return all(self._known(i) is None for i in range(1, 1 + _TRIED))

    def _known(self, i: int) -> float | None:
        if i > 0 and self._steps - self._measured_at[i] > _STALE:
            return None
        if self._medians[i] is None and self._samples[i]:
            self._medians[i] = _median(self._samples[i])
        return self._medians[i]

    def _factor(self, i: int, below: int | None, above: int | None) -> float:
        """How much slower steps are than the model says, between the nearest numbers of rows that were measured."""
        near = [j for j in (below, above) if j is not None]
        factors = [(self._medians[j] or 0.0) / self._prior[j] for j in near]
        if len(near) < 2:
            return factors[0] if factors else 1.0
        share = (i - near[0]) / (near[1] - near[0])
        return factors[0] + share * (factors[1] - factors[0])


@dataclass(frozen=True, slots=True)
class Question:
    """The inputs by which the length of a draft is chosen.

    Attributes:
        chances: the chance of each drafted id to be right if those before it are.
        waiting: the rows that the step has to compute again, see `MOST_ROWS`.
        repeats: whether the right ids of a draft are computed again unless all are right: a layer keeps a state.
        may_cost: the seconds by which the step may be longer than one without a draft.
        beside: the rows of other conversations in the step, each of which gives a token.
    """

    chances: Sequence[float]
    waiting: int = 0
    repeats: bool = False
    may_cost: float = float("inf")
    beside: int = 0

    @property
    def least(self) -> int:
        """The number of rows that the step has if nothing is drafted."""
        return self.beside + self.waiting + 1


def best_length(question: Question, times: StepTimes) -> int:
    """Returns the number of ids to draft, 0 to len(chances), that gives the most expected tokens per second, within
    what the draft `may_cost`; 0 unless that is over 2 % more than without a draft.

    If it would be 0, the step is of one row and none of 2 or 3 rows was measured recently, up to 2 ids are tried, if
    all of them are right with a probability above 0.5.
    """
    chances = question.chances[: _affordable(question, times)]
    tokens, all_right, repeated = 1.0 + question.beside, 1.0, 0.0
    best, best_rate = 0, _WORTH * tokens / times.seconds(question.least)
    for k, chance in enumerate(chances, 1):
        rows = question.least + k
        # Where the k-th id is the first that is wrong, the next step computes the right rows before it again.
        if question.repeats:
            alone = times.seconds(question.beside + 1)
            repeated += all_right * (1 - chance) * (times.seconds(rows) - alone)
        all_right *= chance
        tokens += all_right
        rate = tokens / (times.seconds(rows) + repeated)
        if rate > best_rate:
            best, best_rate = k, rate
    if (
        not best
        and question.least == 1
        and times.is_unknown
        and prod(chances[:_TRIED]) > _TRIED_CHANCE
    ):
        best = min(_TRIED, len(chances))
    return best


def _affordable(question: Question, times: StepTimes) -> int:
    """The most ids that cost no more than they may, whatever the step turns out to take and the next one repeats."""
    least = times.seconds(question.least)
    most = MOST_ROWS - question.least
    lengths = range(1, min(most, len(question.chances)) + 1)
    may_cost = question.may_cost / 2 if question.repeats else question.may_cost
    dear = (k for k in lengths if times.at_most(question.least + k) > least + may_cost)
    return next(dear, lengths.stop) - 1


@dataclass(slots=True)
class Account:
    """The seconds that drafts have saved against computing the same tokens one by one.

    Attributes:
        plain_s: the seconds that all tokens so far would have taken one by one.
        balance_s: the seconds gained so far, as far as they may be lost again; negative: lost.
    """

    plain_s: float = 0.0
    balance_s: float = 0.0

    def add(self, tokens: int, seconds: float, plain: float, drafted: bool) -> None:
        """Adds a step that gave `tokens` tokens in `seconds` to the account; a step of one token alone would take
        `plain` seconds. `drafted`: whether the step had a draft.
        """
        self.plain_s += tokens * plain
        if drafted:
            self.balance_s = min(self.balance_s + tokens * plain - seconds, _SAVED_STEPS * plain)

    def may_cost(self, plain: float) -> float:
        """Returns the seconds by which a draft may make the next step longer, 0 or more; a step of one token alone
        takes `plain` seconds.
        """
        return max(0.0, self.balance_s + _LOST_SHARE * self.plain_s + _CREDIT_STEPS * plain)


def _median(samples: Collection[float]) -> float:
    """The median, by hand: loading `statistics`, or what numpy.median needs, would hold up a chat's first word."""
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
