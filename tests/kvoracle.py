"""Encodes and decodes heads of an fp8 cache by the exact rule of `ktcli.ops.kvformat`, slowly, to judge the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktcli.ops.kvformat import MOST

F32 = NDArray[np.float32]

_NAN = 0x7F
_BIAS = 127  # of scale bytes


def encode(x: F32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns the E4M3 codes [..., columns] and the scale bytes [...] of heads, the rows of x [..., columns]."""
    size = np.abs(np.asarray(x, np.float32))
    a = np.where(np.isnan(size), np.float32(np.inf), size).max(axis=-1).astype(np.float32)
    bits = a.view(np.uint32)
    p = (bits >> 23).astype(np.int64) - 126
    e = p - 9 + ((bits & 0x7FFFFF) > 0x600000)
    scale = np.where(a == 0, 0, np.maximum(e + _BIAS, 0)).astype(np.uint8)
    factor = np.ldexp(1.0, _BIAS - scale.astype(np.int64))  # f64: nothing overflows or is rounded
    codes = _nearest(np.asarray(x, np.float64) * factor[..., None])
    return np.where(a[..., None] == 0, 0, codes).astype(np.uint8), scale


def decode(codes: NDArray[np.uint8], scale: NDArray[np.uint8]) -> F32:
    """Returns the f32 values of heads: the rows of codes [..., columns] times their scales [...]."""
    values = _VALUES[codes & 0x7F] * np.where(codes & 0x80, -1.0, 1.0)
    unit = np.ldexp(1.0, scale.astype(np.int64) - _BIAS)
    return np.asarray(values * unit[..., None], np.float32)


def _value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if code == _NAN:
        return float("nan")
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


_VALUES = np.array([_value(code) for code in range(128)])


def _nearest(v: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Returns the nearest codes."""
    values = _VALUES[:_NAN]
    size = np.minimum(np.abs(v), MOST)
    below = np.clip(np.searchsorted(values, size, side="right") - 1, 0, _NAN - 1)
    above = np.minimum(below + 1, _NAN - 1)
    down, up = size - values[below], values[above] - size
    nearer = (up < down) | ((up == down) & (below % 2 == 1))
    codes = np.where(np.isnan(v), _NAN, np.where(nearer, above, below))
    return (codes | np.where(np.signbit(v) & ~np.isnan(v), 0x80, 0)).astype(np.uint8)
