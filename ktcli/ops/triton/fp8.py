"""Heads of an fp8 cache, by the rule of `ops.kvformat`: numbers to codes and scale bytes, and codes to numbers.

All in integers: GPUs before sm_89 convert no E4M3, and so no GPU's bits differ.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.pages import ScaledPages
from ktcli.ops.triton.early import early, enter


@triton.jit
def coded(x, inside):
    """Returns the E4M3 codes of a head's columns x (f32) and the head's scale byte, both int32. Codes are 0 where not
    `inside`.
    """
    x = tl.where(inside, x, 0.0)
    # Sizes of numbers are ordered as their bits; NaN counts as infinity.
    most = tl.max(tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000), axis=0)
    above = tl.where((most & 0x7FFFFF) > 0x600000, 1, 0)
    byte = tl.where(most == 0, 0, tl.maximum((most >> 23) - 8 + above, 0))
    factor = ((254 - byte) << 23).to(tl.float32, bitcast=True)  # 2^(127 - byte)
    return tl.where(most == 0, 0, _nearest(x * factor)), byte


@triton.jit
def store_head(codes, scale, x, inside):
    """Writes a head's columns x, f32, as E4M3 codes and a scale byte; only columns that are `inside`."""
    code, byte = coded(x, inside)
    tl.store(codes, code.to(tl.uint8), mask=inside)
    tl.store(scale, byte.to(tl.uint8))


@triton.jit
def _nearest(x):
    """Returns the codes nearest to x f32."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    least = tl.minimum(size, 0x43E00000)  # 448
    normal = ((least + 0x7FFFF + ((least >> 20) & 1)) >> 20) - 960  # the biases' distance, 120
    # Below 2^-6 codes are multiples of 2^-9, which is the unit of the last place at 2^14.
    small = (least.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(least < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code)


@triton.jit
def numbers(codes):
    """Returns the values of E4M3 codes (uint8) as bf16, which holds them exactly."""
    wide = codes.to(tl.int32)
    size = (wide & 0x7F) << 20
    value = size.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the biases' distance
    value = tl.where(size == 0x7F00000, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value).to(tl.bfloat16)


@triton.jit
def units(scales):
    """Returns the values of E8M0 scale bytes, powers of two, as f32."""
    wide = scales.to(tl.int32)
    return tl.where(wide > 0, wide << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def _append_heads_kernel(
    new, codes, scales, positions, pages, new_row, width, table_width, run, first, other,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes a head of new[row] to its place in codes [pages][PAGE][width] and scales [pages][PAGE][heads]. The first
    head has `first` columns, each `other` one so many. Grid (heads, rows)."""
    enter(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    page = tl.load(pages + (row // run).to(tl.int64) * table_width + position // PAGE)
    place = page.to(tl.int64) * PAGE + position % PAGE
    start = tl.where(head > 0, first + (head - 1) * other, 0)
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(head > 0, other, first)
    value = tl.load(new + row.to(tl.int64) * new_row + start + column, mask=inside, other=0.0)
    to = codes + place * width + start + column
    store_head(to, scales + place * tl.num_programs(0) + head, value.to(tl.float32), inside)


def append_scaled(cache: ScaledPages, new: Tensor, rows: Rows) -> None:
    """Encodes the rows `new` [T, elements] and writes them to their positions in an fp8 cache."""
    width, heads = new.shape[1], cache.scales.shape[-1]
    first, *others = cache.widths or (width // heads,) * heads
    other = others[0] if others else first
    _append_heads_kernel[(heads, new.shape[0])](
        new, cache.codes, cache.scales, rows.positions, rows.pages, new.stride(0), width,
        rows.pages.shape[1], rows.run, first, other,
        PAGE=PAGE_TOKENS, BLOCK=triton.next_power_of_2(max(first, other)), **early(new),
    )  # fmt: skip
