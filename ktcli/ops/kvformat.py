"""Declares the number formats of the KV cache, and defines exactly what an `fp8` cache contains.

`bf16` and `f32` are plain numbers. `fp8` has a code of 8 bits for each element, OCP E4M3 as torch.float8_e4m3fn, and a
scale byte, E8M0, for each head and each position. A layer's part of a page holds, for each part of its operation in
order, the codes [64][elements], and behind the codes of all parts the scale bytes [64][heads] of each part.

Why a scale of each position and not one of a page: a page fills token by token. A scale of the whole page would have
to round codes again that other sequences share, and bits would depend on how a prompt is cut into chunks; but a
sequence's logits must not depend on who shares its step.

The rule, for the columns x of one head at one position, in f32: a = max |x|, where a NaN counts as infinity. If a = 0
the scale byte and all codes are 0. Else let 0.5 <= m < 1 with a = m * 2^p, that is p = (exponent field of a) - 126;
e = p - 9, and one more where m > 0.875 (23 fraction bits above 0x600000), so that a * 2^-e <= 448; the scale byte is
s = max(e + 127, 0), its value 2^(s - 127). A code is x * 2^(127 - s) rounded to the nearest E4M3, ties to the even
code, no further than 448 = 0x7e; NaN is 0x7f. Zeros keep their signs, unless all are zero. `encode` and `decode` do
this slowly, and judge the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktcli.records import dataclass

F32 = NDArray[np.float32]

MOST = 448.0  # the largest E4M3 number, code 0x7e
_NAN = 0x7F
_BIAS = 127  # of scale bytes


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """A number format of the KV cache.

    Attributes:
        element_bytes: the bytes of an element.
        scale_bytes: the bytes of a head's scale, at each position.
    """

    name: str
    element_bytes: int
    scale_bytes: int = 0

    def bytes_of(self, elements: int, heads: int) -> int:
        """Returns the bytes that `elements` elements and the scales of `heads` heads take."""
        return elements * self.element_bytes + heads * self.scale_bytes


BF16 = CacheFormat("bf16", 2)
F32_CACHE = CacheFormat("f32", 4)
FP8 = CacheFormat("fp8", 1, 1)
FORMATS = {each.name: each for each in (BF16, F32_CACHE, FP8)}


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
