"""Looking up what a conversation repeats, against a search of all of it; and how long drafts are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.engine.draft import GRAMS, Draft, Lookup
from ktcli.engine.draft_length import (
    MOST_ROWS,
    Acceptance,
    Account,
    Question,
    StepTimes,
    best_length,
)
from ktcli.engine.drafting import NO_DRAFTS, Drafting, DraftOptions
from ktcli.errors import UsageError

PRIOR = [1.0 + 0.2 * rows for rows in range(MOST_ROWS)]


def searched(ids: Sequence[int], most: int, window: int) -> Draft:
    """The latest place, of those that `window` holds, with the longest of GRAMS that stands at the end of `ids`."""
    for kind, n in enumerate(GRAMS):
        for end in range(len(ids) - 1, max(n, len(ids) - window) - 1, -1):
            if list(ids[end - n : end]) == list(ids[len(ids) - n :]):
                after = list(ids)
                for i in range(most):
                    after.append(after[end + i])
                return Draft(tuple(after[len(ids) :]), kind)
    return Draft()


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.integers(1, 9),
    st.sampled_from([5, 40, 1000]),
    st.integers(0, 120),
)
def test_lookup_finds_what_a_search_finds(
    ids: list[int], most: int, window: int, told: int
) -> None:
    lookup = Lookup(window)
    lookup.follow(ids[:told])
    assert lookup.draft(most) == searched(ids[:told], most, window)
    for end in range(told, len(ids)):
        lookup.extend(ids[end])
        assert lookup.draft(most) == searched(ids[: end + 1], most, window)


@pytest.mark.parametrize("window", [5, 40, 100])
def test_lookup_finds_what_a_search_finds_in_a_long_text(window: int) -> None:
    """Where places are forgotten that come again and again."""
    ids = np.random.default_rng(window).integers(0, 3, 400).tolist()
    lookup = Lookup(window)
    for end, id in enumerate(ids, 1):
        lookup.extend(id)
        assert lookup.draft(4) == searched(ids[:end], 4, window)


def test_the_place_that_agrees_in_more_ids_is_a_better_guess_than_a_later_one() -> None:
    same = [11, 12, 13, 14, 15, 16, 17, 18]
    lookup = Lookup()
    lookup.follow([1, *same, 21, 22, 2, *same[-3:], 31, 32, 3, *same])
    assert lookup.draft(2).ids == (21, 22)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60))
def test_another_conversation_leaves_nothing_of_the_one_before(
    first: list[int], second: list[int]
) -> None:
    lookup = Lookup()
    lookup.follow(first)
    lookup.follow(second)
    assert lookup.draft(8) == searched(second, 8, 1000)


def test_memory_is_bounded() -> None:
    lookup = Lookup(100)
    lookup.follow(np.random.default_rng(0).integers(0, 10**6, 5000).tolist())
    assert all(len(ends) <= 100 for ends in lookup._ends.values())
    assert all(len(order) <= 100 for order in lookup._order.values())


CHANCES = st.lists(st.floats(0, 1), max_size=8)
TIMES = st.lists(st.floats(0.1, 3), min_size=MOST_ROWS, max_size=MOST_ROWS).map(
    lambda more: np.cumsum(more).tolist()
)


def known(seconds: Sequence[float]) -> StepTimes:
    """Times that were all measured."""
    times = StepTimes(PRIOR)
    for rows, took in enumerate(seconds, 1):
        times.add(rows, took)
    return times


@given(CHANCES, TIMES, st.integers(0, 8))
def test_the_best_length_has_the_most_tokens_per_second(
    chances: list[float], seconds: list[float], waiting: int
) -> None:
    def rate(k: int) -> float:
        tokens = 1 + sum(np.prod(chances[:i]) for i in range(1, k + 1))
        return float(tokens / times.seconds(waiting + 1 + k))

    times = known(seconds)
    best = best_length(Question(chances, waiting), times)
    fastest = max(range(len(chances) + 1), key=rate)
    assert rate(best) == pytest.approx(rate(fastest)) or (
        best == 0 and rate(fastest) <= 1.0201 * rate(0)
    )


@given(CHANCES, TIMES, st.floats(0, 5))
def test_a_step_costs_no_more_than_it_may(
    chances: list[float], seconds: list[float], may_cost: float
) -> None:
    times = known(seconds)
    best = best_length(Question(chances, may_cost=may_cost), times)
    assert times.seconds(1 + best) <= times.seconds(1) + may_cost


@given(CHANCES, TIMES)
def test_what_is_computed_again_makes_drafts_no_longer_worth_it(
    chances: list[float], seconds: list[float]
) -> None:
    times = known(seconds)
    plain = best_length(Question(chances), times)
    assert not best_length(Question(chances, repeats=True), times) or plain


def test_sure_drafts_are_long_and_hopeless_ones_are_none() -> None:
    times = known(PRIOR)
    assert best_length(Question([1.0] * 8), times) == 8
    assert best_length(Question([0.05] * 8), times) == 0
    assert best_length(Question([1.0] * 8, waiting=MOST_ROWS - 3), times) == 2
    assert best_length(Question([]), times) == 0


def test_times_are_measured_and_forgotten() -> None:
    times = StepTimes(PRIOR)
    assert times.seconds(3) == PRIOR[2]
    times.add(1, 10 * PRIOR[0])
    assert times.seconds(5) == pytest.approx(10 * PRIOR[4])  # the model's ratios
    for _ in range(3):
        times.add(9, 50 * PRIOR[8])
    assert times.seconds(9) == pytest.approx(50 * PRIOR[8])
    assert 10 * PRIOR[4] < times.seconds(5) < 50 * PRIOR[4]  # between what was measured
    times.add(9, 1000.0)  # one slow step is no rule
    assert times.seconds(9) == pytest.approx(50 * PRIOR[8])
    for _ in range(600):
        times.add(1, 2.0)
    assert times.seconds(1) == 2.0 and times.seconds(9) == pytest.approx(2 * PRIOR[8])
    assert times.seconds(1000) == times.seconds(MOST_ROWS)
    times.add(1000, 5.0)


def test_times_are_medians_and_between_measured_ones_as_much_slower_as_both_say() -> None:
    times = StepTimes(PRIOR)
    for seconds, median in ((1.0, 1.0), (3.0, 2.0), (3.0, 3.0), (1.0, 2.0)):
        times.add(1, seconds)
        assert times.seconds(1) == median
    times = StepTimes(PRIOR)
    times.add(1, PRIOR[0])
    times.add(5, 3 * PRIOR[4])
    assert times.seconds(2) == pytest.approx(1.5 * PRIOR[1])
    assert times.seconds(4) == pytest.approx(2.5 * PRIOR[3])
    assert times.seconds(7) == pytest.approx(3 * PRIOR[6])


def test_a_slow_step_without_a_draft_is_no_loss_of_drafts() -> None:
    for drafted, drafts in ((0, True), (2, False)):
        times = StepTimes(PRIOR)
        for rows in range(1, MOST_ROWS + 1):
            for _ in range(3):
                times.add(rows, PRIOR[rows - 1])
        drafting = Drafting(Guesses(), times)
        drafting.begin([1, 2, 3])
        drafting.ran(1 + drafted, 0, 1000.0)  # the machine was asleep
        drafting.said(0)
        assert bool(drafting.next(0, 8)) == drafts


def test_chances_follow_what_was_counted() -> None:
    acceptance = Acceptance((0.5, 0.9))
    assert acceptance.chances(0, 3) == [0.5] * 3
    for _ in range(60):
        acceptance.count(0, 0, right=False)
        acceptance.count(1, 4, right=True)
    first, later = acceptance.chances(0, 2)
    assert first < 0.1 and later == 0.5
    assert acceptance.chances(1, 2) == [0.9, pytest.approx(1, abs=0.02)]


class Guesses:
    """Guesses that id 0 comes next, always."""

    kinds = (0.9,)

    def follow(self, ids: Sequence[int]) -> None: ...
    def extend(self, id: int) -> None: ...
    def draft(self, most: int) -> Draft:
        return Draft((0,) * most)


def simulated(
    chance: float, seconds: Sequence[float], n: int, *, repeats: bool = False, prior: float = 0.2
) -> tuple[float, float]:
    """The seconds of n tokens with drafts, and without; the step times that are assumed first are wrong."""
    draw = np.random.default_rng(int(chance * 100) + n)
    times = StepTimes([1.0 + prior * rows for rows in range(MOST_ROWS)])
    drafting = Drafting(Guesses(), times, repeats=repeats)
    drafting.begin([1, 2, 3])
    said, took, waiting = 0, 0.0, 0
    while said < n:
        drafted = drafting.next(waiting, 8)
        rows = waiting + 1 + len(drafted)
        step = seconds[rows - 1] * draw.uniform(0.97, 1.03)
        took += step
        times.add(rows, step)
        drafting.ran(rows, 0, step)
        right = 0
        while True:
            id = int(draw.random() >= chance)
            drafting.said(id)
            said += 1
            if right == len(drafted) or id:
                break
            right += 1
        waiting = waiting + 1 + right if repeats and right < len(drafted) else 0
    return took, said * seconds[0]


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_drafts_never_cost_two_percent(chance: float, cost: float, repeats: bool) -> None:
    """Whatever the chance and the true times, and though both were thought to be good."""
    seconds = [1.0 + cost * rows for rows in range(MOST_ROWS)]
    took, plain = simulated(chance, seconds, 500, repeats=repeats)
    assert took <= plain / 0.98


def test_drafts_that_are_right_pay() -> None:
    seconds = [1.0 + 0.1 * rows for rows in range(MOST_ROWS)]
    took, plain = simulated(0.95, seconds, 500)
    assert plain / took > 2.5
    took, plain = simulated(0.95, seconds, 500, prior=0.9)  # though they were thought to be dear
    assert plain / took > 2.0


def test_an_account_lends_little_and_forgets_most_of_what_was_saved() -> None:
    account = Account()
    assert account.may_cost(1.0) == 2.0
    for _ in range(100):
        account.add(1, 1.0, 1.0, drafted=False)
    assert account.may_cost(1.0) == 3.0
    account.add(1, 5.0, 1.0, drafted=True)
    assert account.may_cost(1.0) == 0.0
    for _ in range(100):
        account.add(9, 2.0, 1.0, drafted=True)
    assert account.may_cost(1.0) <= 2 + 0.01 * account.plain_s + 16


def test_wishes() -> None:
    assert DraftOptions.parse(None, "--draft") == DraftOptions()
    assert not DraftOptions.parse("off", "--draft").drafts
    assert DraftOptions.parse("lookup", "--draft").length is None
    assert DraftOptions.parse("8", "--draft").length == 8
    for text in ("0", "9", "-1", "on", "", "\u0663", "1" * 5000):
        with pytest.raises(UsageError, match="must be off, lookup, or 1 to 8") as caught:
            DraftOptions.parse(text, "KT_DRAFT")
        assert len(str(caught.value)) < 120
    assert NO_DRAFTS.of(None) is None
