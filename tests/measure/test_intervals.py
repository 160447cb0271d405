"""The 95 % interval of a mean over a text: judged by simulation, where the true mean is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from ktcli.measure.intervals import (
    LEAST_GROUPS,
    LEAST_VALUES,
    MOST_BLOCKS,
    block_means,
    grouped_interval,
    interval,
    student,
)

# Two-sided 95 %, from tables.
TABLE = {5: 2.5706, 7: 2.3646, 10: 2.2281, 15: 2.1314, 20: 2.0860, 31: 2.0395, 60: 2.0003}


@pytest.mark.parametrize(("freedom", "t"), TABLE.items())
def test_student_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert abs(student(freedom) - t) < 1e-3


def alike(rng: np.random.Generator, times: int, n: int, memory: float) -> NDArray[np.float64]:
    """Sequences [times, n] that remember the value before, skewed as likelihoods are; their mean is 1."""
    steps = rng.standard_normal((n, times)) * np.sqrt(1 - memory**2)
    steps[0] /= np.sqrt(1 - memory**2)
    for i in range(1, n):
        steps[i] += memory * steps[i - 1]
    return np.ascontiguousarray(steps.T**2)


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_nineteen_of_twenty_intervals_hold_the_true_mean(memory: float) -> None:
    rng = np.random.default_rng(1)
    n, times, inside, naive = 6400, 300, 0, 0
    for values in alike(rng, times, n, memory):
        found = interval(values)
        inside += found.low <= 1 <= found.high
        naive += abs(values.mean() - 1) <= 1.96 * values.std() / np.sqrt(n)
    # Of 300 such intervals 285 are expected, 275 to 295 in 99 of 100 experiments.
    assert 272 <= inside <= 296
    # The textbook's formula holds for independent values only.
    assert naive >= 272 if memory == 0 else naive < 200


def test_blocks_are_plain_means_of_consecutive_values() -> None:
    values = np.random.default_rng(2).standard_normal(1003)
    cuts = [i * 1003 // 31 for i in range(32)]
    plain = [values[a:b].mean() for a, b in pairwise(cuts)]
    assert np.allclose(block_means(values), plain, rtol=0, atol=1e-12)
    assert len(block_means(np.ones(100_000))) == MOST_BLOCKS
    found = interval(values)
    half = student(30) * np.std(plain, ddof=1) / np.sqrt(31)
    assert found.mean == values.mean() and found.half == pytest.approx(half)


def test_what_is_constant_is_certain() -> None:
    found = interval(np.full(LEAST_VALUES, 0.25))
    assert found.low == found.mean == found.high == 0.25
    with pytest.raises(ValueError, match="255 values"):
        interval(np.ones(LEAST_VALUES - 1))


def test_an_interval_in_other_units() -> None:
    found = interval(np.random.default_rng(3).random(400))
    assert found.exp().low == pytest.approx(np.exp(found.low))
    assert found.scaled(1e4).exp().mean < np.inf  # a model of noise has such likelihoods
    assert found.scaled(2.0).half == pytest.approx(2 * found.half)
    cut = found.within(0.0, found.mean)
    assert (cut.low, cut.high) == (found.low, found.mean)


def test_groups_of_values_that_are_alike() -> None:
    """Rows of different lengths, each with a level of its own, which longer ones do not have higher."""
    rng = np.random.default_rng(4)
    times, groups, inside, naive = 400, 40, 0, 0
    for _ in range(times):
        counts = rng.integers(1, 60, groups).astype(np.float64)
        levels = 1 + 0.5 * rng.standard_normal(groups)
        values = [
            level + 0.2 * rng.standard_normal(int(n))
            for level, n in zip(levels, counts, strict=True)
        ]
        found = grouped_interval(np.array([each.sum() for each in values]), counts)
        inside += found.low <= 1 <= found.high
        whole = np.concatenate(values)
        assert found.mean == pytest.approx(whole.mean())
        naive += abs(whole.mean() - 1) <= 1.96 * whole.std() / np.sqrt(whole.size)
    # 380 of 400 are expected, 367 or more in 99 of 100 experiments; the linearised ratio is a little short.
    assert 362 <= inside <= 394
    assert naive < 250  # tokens are not independent


def test_groups_of_one_value_are_a_plain_mean() -> None:
    values = np.random.default_rng(5).standard_normal(20)
    found = grouped_interval(values, np.ones(20))
    assert found.half == pytest.approx(student(19) * values.std(ddof=1) / np.sqrt(20))
    with pytest.raises(ValueError, match="7 groups"):
        grouped_interval(np.ones(LEAST_GROUPS - 1), np.ones(LEAST_GROUPS - 1))
