"""Kernels that do several operations at once, for steps of few rows, which are bound by launches. Not yet run on a GPU.

Each computes what the operations would one after the other, in the same order of additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch.functions import Rows, frequencies
from ktcli.ops.torch.merged import Heads, Latent
from ktcli.ops.torch.packed import Packed
from ktcli.ops.torch.pages import KvPages, Pages, memory_of
from ktcli.ops.torch.parts import Parts
from ktcli.ops.torch.scaled import ScaledPages
from ktcli.ops.triton.attention import attend_latent, gqa_one
from ktcli.ops.triton.fp8 import store_head
from ktcli.ops.triton.small import partners
from ktcli.ops.triton.sums import Sum, summed


@triton.jit
def _add_norm_kernel(
    a, b, c, gain, total, out, a_row, width, eps,
    ADDED: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a row of the `Sum` b, or of b and c if there are two SUMS, to which a row of a is ADDED, and its RMSNorm.
    Grid (rows)."""
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
    x, row, start, gain, inv_freq, position, eps, normed, first, half, scale,
    D: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the D columns from `start` on of a row of the `Sum` x as attention takes them: the first `normed` of them
    normed, 2 `half` from `first` on rotated. All that are rotated are normed, or none is."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = summed(x, row, start + column, inside)
    factor = 1.0
    if NORMED:
        is_normed = column < normed
        mean = tl.sum(tl.where(is_normed, value * value, 0.0), axis=0) / normed
        factor = 1 / tl.sqrt(mean + eps)
        gains = tl.load(gain + column, mask=is_normed, other=0.0)
        value = tl.where(is_normed, value * factor * gains, value)
    if ROTATED:
        place = column - first
        is_rotated = (place >= 0) & (place < 2 * half) & inside
        second, pair, other = partners(column, place, half, INTERLEAVED)
        partner = summed(x, row, start + other, is_rotated)
        if NORMED:
            is_normed = is_rotated & (other < normed)
            gains = tl.load(gain + other, mask=is_normed, other=0.0)
            partner = tl.where(is_normed, partner * factor * gains, partner)
        frequency = tl.load(inv_freq + pair, mask=is_rotated, other=0.0)
        angle = position.to(tl.float32) * frequency
        cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
        rotated = value * cos + tl.where(second, partner, -partner) * sin
        value = tl.where(is_rotated, rotated, value)
    return value


@triton.jit
def _heads_kernel(
    q, k, v, q_gain, k_gain, inv_freq, positions, pages, out, keys, values, k_scales, v_scales,
    table_width, heads, kv_heads, eps, first, half, scale, shift,
    D: tl.constexpr, DV: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes queries ready in out [rows][heads][D], and keys and values in their pages. Grid (heads + 2 kv_heads, rows).

    q, k, v: each a `Sum`; keys [pages][PAGE][kv_heads][D]; values [pages][PAGE][kv_heads][DV]; codes if FP8,
    with scales [pages][PAGE][kv_heads].
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    position = tl.load(positions + row)
    page = tl.load(pages + row * table_width + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv_heads
    if head < heads:
        ready = _ready(
            q, row, head * D, q_gain, inv_freq, position + shift, eps, D, first, half, scale,
            D, NORMED, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        tl.store(out + (row * heads + head) * D + column, ready, mask=column < D)
    elif head < heads + kv_heads:
        number = head - heads
        ready = _ready(
            k, row, number * D, k_gain, inv_freq, position + shift, eps, D, first, half, scale,
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


@triton.jit
def _latent_kernel(
    q, latent, gain, inv_freq, positions, pages, out, cache, scales, table_width, heads, eps, half, scale, shift,
    NOPE: tl.constexpr, LORA: tl.constexpr, ROPE: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LATENT: tl.constexpr,
):  # fmt: skip
    """Makes queries ready in out [rows][heads][NOPE + ROPE], and the latent in its page of cache
    [pages][PAGE][LORA + ROPE], codes if FP8, with scales [pages][PAGE][1 or, with ROPE, 2];
    both come as a `Sum`. Grid (heads + 1, rows)."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row)
    if head < heads:
        D: tl.constexpr = NOPE + ROPE
        query = _ready(
            q, row, head * D, gain, inv_freq, position + shift, eps, 0, NOPE, half, scale,
            D, False, ROTATED, INTERLEAVED, BLOCK,
        )  # fmt: skip
        at_query = tl.arange(0, BLOCK)
        tl.store(out + (row * heads + head) * D + at_query, query, mask=at_query < D)
    else:
        WIDTH: tl.constexpr = LORA + ROPE
        ready = _ready(
            latent, row, 0, gain, inv_freq, position + shift, eps, LORA, LORA, half, scale,
            WIDTH, True, ROTATED, INTERLEAVED, BLOCK_LATENT,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_LATENT)
        page = tl.load(pages + row * table_width + position // PAGE).to(tl.int64)
        place = page * PAGE + position % PAGE
        to = cache + place * WIDTH + column
        if FP8:
            at_scale = scales + place * (2 if ROPE > 0 else 1)
            store_head(to, at_scale, ready, column < LORA)
            if ROPE > 0:
                store_head(to, at_scale + 1, ready, (column >= LORA) & (column < WIDTH))
        else:
            tl.store(to, ready.to(cache.dtype.element_ty), mask=column < WIDTH)


def add_norm(
    a: Tensor | None, sums: tuple[Parts, ...], gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns the sum of a [T, N], if there is one, and of one or two sums [T, N], and its RMSNorm with gain [N]."""
    rows, width = sums[0].shape
    total = torch.empty(rows, width, dtype=torch.float32, device=gain.device)
    out = torch.empty_like(total)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(rows,)](
        a, Sum.of(sums[0]), Sum.of(sums[-1]), gain, total, out, 0 if a is None else a.stride(0), width, eps,
        ADDED=a is not None, SUMS=len(sums), BLOCK=block,
        num_warps=32 if block > 4096 else 8 if block > 1024 else 4,
    )  # fmt: skip
    return total, out


def gqa(
    heads: Heads, shape: GqaShape, sinks: Tensor | None, *, rows: Rows, cache: KvPages
) -> Tensor:
    """Norms and rotates the heads, appends keys and values to the cache, and attends; one row of each sequence."""
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
        BLOCK=triton.next_power_of_2(max(s.head_dim, s.value_dim)), num_warps=1,
    )  # fmt: skip
    return gqa_one(ready, cache, rows, s, sinks)


def mla(
    latent: Latent, uk_in: Packed, uv: Packed, shape: MlaShape, *, rows: Rows, cache: tuple[Pages]
) -> Tensor:
    """Rotates queries, norms and rotates the latent, appends it to the cache, and attends; one row of each sequence."""
    s, rope, sequences = shape, latent.rope or Rope(0, ()), latent.q.shape[0]
    ready = torch.empty(
        sequences, s.heads * (s.nope + s.rope), dtype=torch.float32, device=rows.pages.device
    )
    _latent_kernel[(s.heads + 1, sequences)](
        Sum.of(latent.q), Sum.of(latent.latent),
        latent.gain, frequencies(rope, ready.device), rows.positions, rows.pages, ready, *memory_of(cache[0]),
        rows.pages.shape[1], s.heads, latent.eps, rope.dim // 2, float(rope.scale), rope.shift,
        NOPE=s.nope, LORA=s.lora, ROPE=s.rope, ROTATED=latent.rope is not None,
        INTERLEAVED=rope.interleaved, FP8=isinstance(cache[0], ScaledPages), PAGE=PAGE_TOKENS,
        BLOCK=triton.next_power_of_2(s.nope + s.rope),
        BLOCK_LATENT=triton.next_power_of_2(s.lora + s.rope), num_warps=4,
    )  # fmt: skip
    return attend_latent(ready, uk_in, uv, s, rows, *cache)
