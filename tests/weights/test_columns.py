"""Columns of a head on one scale: the product stays, and small columns are no longer rounded for large ones."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import pack, unpack

from ktcli.weights.columns import MOST, factors_of, suffers
from ktcli.weights.formats import FORMATS

N, K = 96, 64


def head() -> tuple[np.ndarray, np.ndarray]:
    """A matrix with one column 40 times as large as the others, whose input is small there."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((N, K)).astype(np.float32)
    matrix[:, 7] *= 40
    gain = np.ones(K, np.float32)
    gain[7] = 0.05
    return matrix, gain


def factors(matrix: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return factors_of(np.abs(matrix).max(axis=0), gain)


def rounded(matrix: np.ndarray) -> np.ndarray:
    fmt = FORMATS["int8-row"]
    return unpack(fmt, pack(fmt, np.ascontiguousarray(matrix)), N, K)


def test_the_product_is_nearer():
    matrix, gain = head()
    by = factors(matrix, gain)
    x = np.random.default_rng(1).standard_normal((K, 200)).astype(np.float32)
    exact = matrix @ (gain[:, None] * x)
    before = rounded(matrix) @ (gain[:, None] * x) - exact
    after = rounded(matrix / by) @ ((gain * by)[:, None] * x) - exact
    assert np.square(after).mean() < np.square(before).mean() / 100


def test_alike_columns_stay():
    matrix, gain = np.ones((N, K), np.float32), np.full(K, 3, np.float32)
    assert np.array_equal(factors(matrix, gain), np.ones(K))


@pytest.mark.parametrize("where", ["weights", "gain", "both"])
def test_columns_of_zeros(where: str):
    """They have no scale of their own; the others' do not hang on them."""
    matrix, gain = head()
    whole = factors(matrix, gain)
    if where != "gain":
        matrix[:, 3] = 0
    if where != "weights":
        gain[3] = 0
    by = factors(matrix, gain)
    assert by[3] == 1 and np.allclose(np.delete(by, 3), np.delete(whole, 3), rtol=0.1)
    assert np.array_equal(factors(matrix * 0, gain * 0), np.ones(K))


def test_factors_are_bounded():
    matrix, gain = head()
    matrix[:, 0], gain[0] = 3e38, 1e-38
    matrix[:, 1], gain[1] = 1e-38, 3e38
    by = factors(matrix, gain)
    assert np.isfinite(by).all() and by[0] == MOST and by[1] == np.float32(1 / MOST)


def test_factors_of_the_extremes():
    """The root of the largest f32 over that of the smallest is no f32; warnings are errors here."""
    matrix, gain = head()
    matrix[:, 0], gain[0] = 3e38, 1e-45
    by = factors(matrix, gain)
    assert by.dtype == np.float32 and by[0] == MOST and np.isfinite(by).all()


def test_who_suffers():
    assert [name for name, fmt in FORMATS.items() if not suffers(fmt)] == [
        "int4-s8",
        "int4-row-had",
        "int6",
        "fp8",
        "mxfp8",
        "bf16",
        "f32",
    ]
