"""Kernels that do several operations at once, for steps of few rows, which are bound by launches. Not yet run on a GPU.

Each computes what the operations would one after the other, in the same order of additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import GqaShape
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch.functions import Rows, frequencies
from ktcli.ops.torch.merged import Heads
from ktcli.ops.torch.pages import KvPages
from ktcli.ops.triton.attention import gqa_one
from ktcli.ops.triton.small import partners


@triton.jit
def _add_norm_kernel(
    a, b, gain, total, out, a_row, b_row, width, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes the sum of a row of a and one of b, and its RMSNorm. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(a + row * a_row + columns, mask=inside, other=0.0)
    value += tl.load(b + row * b_row + columns, mask=inside, other=0.0)
    tl.store(total + row * width + columns, value, mask=inside)
    mean = tl.sum(value * value, axis=0) / width
    scale = 1 / tl.sqrt(mean + eps)
    value = value * scale * tl.load(gain + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, value, mask=inside)


@triton.jit
def _ready(
    head, gain, inv_freq, position, eps, first, half, scale,
    D: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the D columns of one head, normed and rotated as attention takes them."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(head + column, mask=inside, other=0.0)
    factor = 1.0
    if NORMED:
        mean = tl.sum(value * value, axis=0) / D
        factor = 1 / tl.sqrt(mean + eps)
        value = value * factor * tl.load(gain + column, mask=inside, other=0.0)
    if ROTATED:
        place = column - first
        is_rotated = (place >= 0) & (place < 2 * half) & inside
        second, pair, other = partners(column, place, half, INTERLEAVED)
        partner = tl.load(head + other, mask=is_rotated, other=0.0)
        if NORMED:
            partner = partner * factor * tl.load(gain + other, mask=is_rotated, other=0.0)
        frequency = tl.load(inv_freq + pair, mask=is_rotated, other=0.0)
        angle = position.to(tl.float32) * frequency
        cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
        rotated = value * cos + tl.where(second, partner, -partner) * sin
        value = tl.where(is_rotated, rotated, value)
    return value


@triton.jit
def _heads_kernel(
    q, k, v, q_gain, k_gain, inv_freq, positions, pages, out, keys, values,
    q_row, k_row, v_row, table_width, heads, kv_heads, eps, first, half, scale, shift,
    D: tl.constexpr, DV: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes queries ready in out [rows][heads][D], and keys and values in their pages. Grid (heads + 2 kv_heads, rows).

    keys [pages][PAGE][kv_heads][D]; values [pages][PAGE][kv_heads][DV].
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    position = tl.load(positions + row)
    page = tl.load(pages + row * table_width + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv_heads
    if head < heads:
        ready = _ready(
            q + row * q_row + head * D, q_gain, inv_freq, position + shift, eps, first, half, scale,
            D, NORMED, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        tl.store(out + (row * heads + head) * D + column, ready, mask=column < D)
    elif head < heads + kv_heads:
        ready = _ready(
            k + row * k_row + (head - heads) * D, k_gain, inv_freq, position + shift, eps, first, half,
            scale, D, NORMED, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        to = keys + (place + head - heads) * D + column
        tl.store(to, ready.to(keys.dtype.element_ty), mask=column < D)
    else:
        number = head - heads - kv_heads
        value = tl.load(v + row * v_row + number * DV + column, mask=column < DV)
        to = values + (place + number) * DV + column
        tl.store(to, value.to(values.dtype.element_ty), mask=column < DV)


def add_norm(a: Tensor, b: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns a + b, [T, N] each, and its RMSNorm with gain [N]."""
    total, out = torch.empty_like(a), torch.empty_like(a)
    width = a.shape[1]
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(a.shape[0],)](
        a, b, gain, total, out, a.stride(0), b.stride(0), width, eps,
        BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return total, out


def gqa(
    heads: Heads, v: Tensor, shape: GqaShape, sinks: Tensor | None, *, rows: Rows, cache: KvPages
) -> Tensor:
    """Norms and rotates the heads, appends keys and values to the cache, and attends; one row of each sequence."""
    s, q, k = shape, heads.q, heads.k
    rope = heads.rope or Rope(0, ())
    ready = torch.empty(q.shape[0], s.heads * s.head_dim, dtype=torch.float32, device=q.device)
    _heads_kernel[(s.heads + 2 * s.kv_heads, q.shape[0])](
        q, k, v, heads.q_gain, heads.k_gain, frequencies(rope, q.device), rows.positions, rows.pages,
        ready, *cache, q.stride(0), k.stride(0), v.stride(0), rows.pages.shape[1], s.heads, s.kv_heads,
        heads.eps, heads.first, rope.dim // 2, float(rope.scale), rope.shift,
        D=s.head_dim, DV=s.value_dim, NORMED=heads.q_gain is not None, ROTATED=heads.rope is not None,
        INTERLEAVED=rope.interleaved, PAGE=PAGE_TOKENS,
        BLOCK=triton.next_power_of_2(max(s.head_dim, s.value_dim)), num_warps=1,
    )  # fmt: skip
    return gqa_one(ready, cache, rows, s, sinks)
