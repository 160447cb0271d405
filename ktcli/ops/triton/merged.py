"""Kernels that perform several operations at once, for steps of few rows, which are bound by launches.

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
from ktcli.ops.torch.merged import Heads, Parts
from ktcli.ops.torch.pages import KvPages, memory_of
from ktcli.ops.triton.attention import gqa_one
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.fp8 import store_head
from ktcli.ops.triton.small import partners, turned
from ktcli.ops.triton.sums import Sum, summed


@triton.jit
def _add_norm_kernel(
    a, b, c, gain, total, out, a_row, width, eps,
    ADDED: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes a row of the `Sum` b, or of b and c if there are two SUMS, to which a row of a is ADDED, and its RMSNorm.
    Grid (rows)."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = summed(b, row, columns, inside)
    if SUMS == 2:
        value += summed(c, row, columns, inside)
    if ADDED:
        value = tl.load(a + row * a_row + columns, mask=inside, other=0.0) + value
    tl.store(total + row * width + columns, value, mask=inside)
    mean = tl.sum(value * value, axis=0) / width
    scale = 1 / tl.sqrt(mean + eps)
    value = value * scale * tl.load(gain + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, value, mask=inside)


@triton.jit
def _ready(
    x, row, start, gain, inv_freq, position, eps, first, half, scale,
    D: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the D columns from `start` on of a row of the `Sum` x as attention takes them: normed, and 2 `half` of
    them from `first` on rotated."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = summed(x, row, start + column, inside)
    factor = 1.0
    if NORMED:
        factor = 1 / tl.sqrt(tl.sum(value * value, axis=0) / D + eps)
        value = value * factor * tl.load(gain + column, mask=inside, other=0.0)
    if ROTATED:
        place = column - first
        is_rotated = (place >= 0) & (place < 2 * half) & inside
        second, pair, other = partners(column, place, half, INTERLEAVED)
        backend = summed(x, row, start + other, is_rotated)
        if NORMED:
            backend = backend * factor * tl.load(gain + other, mask=is_rotated, other=0.0)
        value = turned(value, backend, second, pair, is_rotated, inv_freq, position, scale)
    return value


@triton.jit
def _heads_kernel(
    q, k, v, q_gain, k_gain, inv_freq, positions, pages, out, keys, values, k_scales, v_scales,
    table_width, heads, kv_heads, eps, first, half, scale, shift,
    D: tl.constexpr, DV: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Makes queries ready in out [rows][heads][D], and keys and values in their pages. Grid (heads + 2 kv_heads, rows).

    q, k, v: each a `Sum`; keys [pages][PAGE][kv_heads][D]; values [pages][PAGE][kv_heads][DV]; codes if FP8,
    with scales [pages][PAGE][kv_heads].
    """
    enter(EARLY)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    position = tl.load(positions + row)
    page = tl.load(pages + row * table_width + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv_heads
    if head < heads:
        ready = _ready(
            q, row, head * D, q_gain, inv_freq, position + shift, eps, first, half, scale,
            D, NORMED, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        tl.store(out + (row * heads + head) * D + column, ready, mask=column < D)
    elif head < heads + kv_heads:
        number = head - heads
        ready = _ready(
            k, row, number * D, k_gain, inv_freq, position + shift, eps, first, half, scale,
            D, NORMED, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        to = keys + (place + number) * D + column
        if FP8:
            store_head(to, k_scales + place + number, ready, column < D)
        else:
            tl.store(to, ready.to(keys.dtype.element_ty), mask=column < D)
    else:
        number = head - heads - kv_heads
        value = summed(v, row, number * DV + column, column < DV)
        to = values + (place + number) * DV + column
        if FP8:
            store_head(to, v_scales + place + number, value, column < DV)
        else:
            tl.store(to, value.to(values.dtype.element_ty), mask=column < DV)


def add_norm(
    a: Tensor | None, sums: tuple[Parts, ...], gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns two tensors f32 [T, N]: the total of a [T, N] (None: nothing) and of one or two sums [T, N] that are not
    yet added up, and the RMSNorm of the total with gain [N].
    """
    rows, width = sums[0].shape
    total = torch.empty(rows, width, dtype=torch.float32, device=gain.device)
    out = torch.empty_like(total)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        a, Sum.of(sums[0]), Sum.of(sums[-1]), gain, total, out, 0 if a is None else a.stride(0), width, eps,
        ADDED=a is not None, SUMS=len(sums), BLOCK=block,
        num_warps=32 if block > 4096 else 8 if block > 1024 else 4, **early(gain),
    )  # fmt: skip
    return total, out


def gqa(
    heads: Heads, shape: GqaShape, sinks: Tensor | None, *, rows: Rows, cache: KvPages
) -> Tensor:
    """Norms and rotates the heads, appends keys and values to the KV cache, and returns grouped-query attention of one
    row of each sequence, [sequences, heads * value_dim] f32.
    """
    s, rope, sequences = shape, heads.rope or Rope(0, ()), heads.q.shape[0]
    ready = torch.empty(
        sequences, s.heads * s.head_dim, dtype=torch.float32, device=rows.pages.device
    )
    (keys, k_scales), (values, v_scales) = map(memory_of, cache)
    _heads_kernel[(s.heads + 2 * s.kv_heads, sequences)](
        Sum.of(heads.q), Sum.of(heads.k), Sum.of(heads.v),
        heads.q_gain, heads.k_gain, frequencies(rope, ready.device), rows.positions, rows.pages,
        ready, keys, values, k_scales, v_scales, rows.pages.shape[1], s.heads, s.kv_heads,
        heads.eps, heads.first, rope.dim // 2, float(rope.scale), rope.shift,
        D=s.head_dim, DV=s.value_dim, NORMED=heads.q_gain is not None, ROTATED=heads.rope is not None,
        INTERLEAVED=rope.interleaved, FP8=k_scales is not None, PAGE=PAGE_TOKENS,
        BLOCK=triton.next_power_of_2(max(s.head_dim, s.value_dim)), num_warps=1, **early(ready),
    )  # fmt: skip
    return gqa_one(ready, cache, rows, s, sinks)
