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
code, no further than 448 = 0x7e; NaN is 0x7f. Zeros keep their signs, unless all are zero. tests/kvoracle.py does this
slowly, and judges the rest.
"""

from __future__ import annotations

from ktcli.records import dataclass

MOST = 448.0  # the largest E4M3 number, code 0x7e


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
        """Returns the bytes that `elements` cached elements and the scales of `heads` heads
        take in this cache format.
        """
        return elements * self.element_bytes + heads * self.scale_bytes


BF16 = CacheFormat("bf16", 2)
F32_CACHE = CacheFormat("f32", 4)
FP8 = CacheFormat("fp8", 1, 1)
FORMATS = {each.name: each for each in (BF16, F32_CACHE, FP8)}
