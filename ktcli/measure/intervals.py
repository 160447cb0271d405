"""The 95 % interval of a mean of values that follow one another in a text, from means of blocks.

Neighbouring tokens are alike, so N tokens are fewer than N independent values, and the textbook's formula
gives intervals that are too narrow. The method of batch means cuts the sequence into at most 32 blocks of
equal length; their means are nearly independent where what is alike lies closer together than a block is
long, and Student's t says how far their mean may be off. Source: Law and Kelton, Simulation Modeling and
Analysis, on batch means.
"""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from ktcli.records import dataclass

MOST_BLOCKS = 32  # more of them would be shorter, and alike; fewer would make t larger
LEAST_BLOCKS = 8
LEAST_BLOCK = 32  # values
LEAST_VALUES = LEAST_BLOCKS * LEAST_BLOCK
LEAST_GROUPS = 8

_Z = 1.959963984540054  # quantile of the normal distribution, two-sided 95 %


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its two-sided 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        return (self.high - self.low) / 2

    def exp(self) -> Interval:
        """Returns the interval whose mean and ends are e to the power of this one's, at most e^700: perplexity from
        negative log-likelihood."""
        return Interval(*(exp(min(each, 700.0)) for each in (self.mean, self.low, self.high)))

    def scaled(self, factor: float) -> Interval:
        """Returns the interval with mean and ends multiplied by a positive factor."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)

    def within(self, low: float, high: float) -> Interval:
        """Returns the interval with its ends limited to `low` and `high`, the range of the quantity, such as 0 and 1
        for a share."""
        return Interval(self.mean, max(self.low, low), min(self.high, high))


def interval(values: NDArray[np.float64]) -> Interval:
    """Returns the mean of values that follow one another in a text, with its two-sided 95 % interval.

    Args:
        values: the values [N], at least LEAST_VALUES.
    """
    means = block_means(values)
    mean, n = float(values.mean()), len(means)
    half = student(n - 1) * float(means.std(ddof=1)) / sqrt(n)
    return Interval(mean, mean - half, mean + half)


def grouped_interval(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Interval:
    """Returns the mean of values that come in independent groups, as tokens do in a file's rows, with its two-sided 95
    % interval.

    It is a ratio estimate: the sum of all values over their number, with a standard error from the groups' residuals
    and Student's t. Source: Cochran, Sampling Techniques, 6.3.

    Args:
        sums: the sum of each group's values [G], at least LEAST_GROUPS.
        counts: the number of each group's values [G], 1 or more.
    """
    n = len(sums)
    if n < LEAST_GROUPS:
        raise ValueError(f"{n} groups, {LEAST_GROUPS} are needed")
    mean = float(sums.sum() / counts.sum())
    off = sums - mean * counts
    half = student(n - 1) * sqrt(float(off @ off) * n / (n - 1)) / float(counts.sum())
    return Interval(mean, mean - half, mean + half)


def block_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the means of the consecutive blocks into which the values [N], at least LEAST_VALUES, are cut, [blocks],
    in order; there are at most MOST_BLOCKS, whose lengths differ by one at most."""
    if len(values) < LEAST_VALUES:
        raise ValueError(f"{len(values)} values, {LEAST_VALUES} are needed")
    count = min(MOST_BLOCKS, len(values) // LEAST_BLOCK)
    starts = np.arange(count) * len(values) // count
    lengths = np.diff(starts, append=len(values))
    return np.asarray(np.add.reduceat(values, starts) / lengths, dtype=np.float64)


def student(freedom: int) -> float:
    """Returns the quantile of Student's t for a two-sided 95 % interval with `freedom` degrees of freedom, within 0.001
    for 5 and more.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z, n = _Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4
