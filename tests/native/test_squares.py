"""Sums of squares: those of numpy in f64, whatever the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.errors import KtError
from ktcli.native import Pool

WIDTHS = (1, 511, 512, 513, 1100)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_each_matrix_has_the_squares_of_its_rows(k: int, threads: int) -> None:
    draw = np.random.default_rng(k)
    x = draw.standard_normal((90, k + 7), dtype=np.float32)[:, 3 : 3 + k]
    x[:, 0] *= 1e20  # f32 has no such square
    rows = draw.integers(0, 90, 400)
    ends = np.array([0, 1, 1, 130, 399, 400])
    sums = np.ones((len(ends), k))
    Pool(threads).add_squares(x, ends, sums, rows)
    for own, found in zip(np.split(rows, ends[:-1]), sums, strict=True):
        wanted = 1 + np.square(x[own].astype(np.float64)).sum(0)
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


def test_threads_do_not_change_a_bit() -> None:
    x = np.random.default_rng(1).standard_normal((1000, 1300), dtype=np.float32)
    sums = [np.zeros((1, 1300)) for _ in range(2)]
    for threads, own in zip((1, 4), sums, strict=True):
        Pool(threads).add_squares(x, np.array([1000]), own)
    assert sums[0].tobytes() == sums[1].tobytes()


@pytest.mark.parametrize(
    ("ends", "rows"),
    [([5], None), ([-1, 2], None), ([3], [0, 1]), ([2], [0, 4]), ([1], [-1]), ([3, 1, 4], None)],
)
def test_what_lies_outside_is_refused(ends: list[int], rows: list[int] | None) -> None:
    sums = np.zeros((len(ends), 8))
    listed = None if rows is None else np.array(rows)
    with pytest.raises(KtError):
        Pool(1).add_squares(np.ones((4, 8), np.float32), np.array(ends), sums, listed)
    assert not sums.any()
