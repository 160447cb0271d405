"""Attention of one new token per sequence over the paged cache: grouped-query and latent.

The cached positions are cut into splits of a fixed number of pages; a program attends to one split for all
query heads that share what it reads, and leaves a sum, its weight and its greatest score; a second kernel
merges the splits of a head. The grid is as wide as the page table: programs behind the length, which only the
device knows, return at once. So a captured step serves any length, and the bits of a result depend on neither
the width of the table nor the GPU.

  Splits. 128 positions of K and V of one head of 128 are 64 kB, 4096 positions of 4 heads 128 programs: an SM
  each. For latent attention they are 256: all heads share 576 numbers a position, 295 kB a split, against
  which the partial results, 2 kB a head, must stay small; programs share the split by 16 heads each.
  A tile is 64 positions, a page, so that a page number is read once per tile; 32 where rows are wide, whose
  two stages must fit the 99 kB of shared memory of a desktop GPU (sm_89, sm_120).

The new token's K and V are written before by a kernel of their own, which norms and rotates queries as well. Its
latent is not: the programs whose split holds the last position norm and rotate it themselves, 576 numbers, and count
it behind what they read from the cache; one of them writes it there. No other reads that place, so no program has to
know whether another has written already. Each rotates the queries that it reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.state import GQA_SPLIT_PAGES, MLA_SPLIT_PAGES
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch.functions import Rows, frequencies
from ktcli.ops.torch.merged import Latent
from ktcli.ops.torch.packed import Packed
from ktcli.ops.torch.pages import KvPages, Pages, ScaledPages, memory_of
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.fp8 import append_scaled, coded, numbers, units
from ktcli.ops.triton.product import vector_products
from ktcli.ops.triton.small import partners, turned
from ktcli.ops.triton.sums import Sum, sum_parts, summed

_MLA_HEADS = 16  # of one program: the least rows of tl.dot
_MERGED_SPLITS = 32  # partial results that are read at once


@triton.jit
def _append_kernel(
    new, cache, positions, pages, new_row, width, table_width, run,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes new[row] to cache[page of the position, place in it] [width]. Grid (blocks of columns, rows)."""
    enter(EARLY)
    row = tl.program_id(1)
    position = tl.load(positions + row)
    page = tl.load(pages + (row // run).to(tl.int64) * table_width + position // PAGE)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(new + row.to(tl.int64) * new_row + columns, mask=columns < width)
    to = cache + (page.to(tl.int64) * PAGE + position % PAGE) * width + columns
    tl.store(to, value.to(cache.dtype.element_ty), mask=columns < width)


@triton.jit
def _lowest(last, window):
    """Returns the first position that one at `last` sees; see `_window`."""
    chunk = last // tl.maximum(-window, 1) * -window
    return tl.where(window > 0, tl.maximum(last + 1 - window, 0), chunk)


@triton.jit
def _gqa_kernel(
    q, k, v, k_scales, v_scales, positions, pages, sums, peaks, weights, q_row, table_width, group, scale, window,
    D: tl.constexpr, DV: tl.constexpr, FP8: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Computes partial attention of the heads of one kv head. Grid (splits, kv heads, sequences).

    q [sequences][kv heads * group * D]; k [pages][PAGE][kv heads][D]; v [pages][PAGE][kv heads][DV]; out: peaks
    and weights [sequences][heads][splits], sums [sequences][heads][splits][DV], for splits that hold a position.
    If FP8, k and v are codes, with k_scales and v_scales [pages][PAGE][kv heads].
    window: see `_window`. BH, BD, BV: group, D and DV, up to a power of two.
    """
    enter(EARLY)
    split, kv, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    last = tl.load(positions + sequence).to(tl.int32)
    first, low = split * (SPLIT * PAGE), _lowest(last, window)
    if (first > last) | (first + SPLIT * PAGE <= low):
        return
    h = tl.arange(0, BH)
    d = tl.arange(0, BD)
    c = tl.arange(0, BV)
    row = q + sequence.to(tl.int64) * q_row + kv * group * D
    mask_q = (h < group)[:, None] & (d < D)[None, :]
    query = tl.load(row + h[:, None] * D + d[None, :], mask=mask_q, other=0.0)
    query = query.to(tl.bfloat16 if FP8 else k.dtype.element_ty)
    peak = tl.full([BH], float("-inf"), tl.float32)
    weight = tl.zeros([BH], tl.float32)
    total = tl.zeros([BH, BV], tl.float32)
    table = pages + sequence.to(tl.int64) * table_width
    # No tile is wholly behind `last` or before `low`: each has a position, so that no peak stays infinite.
    begin = tl.maximum(first, low // BL * BL)
    for at in range(begin, tl.minimum(first + SPLIT * PAGE, last + 1), BL):
        page = tl.load(table + at // PAGE).to(tl.int64)
        place = at % PAGE + tl.arange(0, BL)
        position = at + tl.arange(0, BL)
        seen = (position <= last) & (position >= low)
        in_cache = (page * PAGE + place) * kv_heads + kv
        rows = in_cache[:, None]
        of_keys, of_values = seen[:, None] & (d < D)[None, :], seen[:, None] & (c < DV)[None, :]
        keys = tl.load(k + rows * D + d[None, :], mask=of_keys, other=0.0)  # [BL, BD]
        values = tl.load(v + rows * DV + c[None, :], mask=of_values, other=0.0)  # [BL, BV]
        if FP8:
            keys, values = numbers(keys), numbers(values)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if FP8:
            scores *= units(tl.load(k_scales + in_cache, mask=seen, other=0))[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - new_peak)
        chance = tl.exp(scores - new_peak[:, None])
        weight = weight * shrink + tl.sum(chance, axis=1)
        total = total * shrink[:, None]
        if FP8:
            chance *= units(tl.load(v_scales + in_cache, mask=seen, other=0))[None, :]
        total = tl.dot(chance.to(values.dtype), values, total, input_precision="ieee")
        peak = new_peak
    head = (sequence * kv_heads + kv).to(tl.int64) * group + h
    at_split = head * tl.num_programs(0) + split
    tl.store(peaks + at_split, peak, mask=h < group)
    tl.store(weights + at_split, weight, mask=h < group)
    mask_sums = (h < group)[:, None] & (c < DV)[None, :]
    tl.store(sums + at_split[:, None] * DV + c[None, :], total, mask=mask_sums)


@triton.jit
def _new_latent(
    latent, row, gain, inv_freq, position, eps, half, scale,
    LORA: tl.constexpr, ROPE: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Returns a row of the `Sum` latent: its first LORA columns normed [BC], and its last ROPE rotated [BR]."""
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    value = summed(latent, row, c, c < LORA)
    if NORMED:
        mean = tl.sum(value * value, axis=0) / LORA
        value = value / tl.sqrt(mean + eps) * tl.load(gain + c, mask=c < LORA, other=0.0)
    rope = summed(latent, row, LORA + r, r < ROPE)
    if ROTATED:
        second, pair, other = partners(r, r, half, INTERLEAVED)
        inside = r < 2 * half
        backend = summed(latent, row, LORA + other, inside)
        rope = turned(rope, backend, second, pair, inside, inv_freq, position, scale)
    return value, rope


@triton.jit
def _mla_kernel(
    absorbed, q, latent, gain, inv_freq, cache, scales, positions, pages, sums, peaks, weights,
    q_row, q_head, table_width, heads, scale, eps, half, turn_scale, shift,
    NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
    NOPE: tl.constexpr, LORA: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes the new latent to its page, and computes partial attention of BH heads on the latent. Grid (splits,
    blocks of heads, sequences).

    absorbed [sequences][heads][LORA]; q: columns NOPE.. of each head are those to rotate; latent: a `Sum`, to be
    normed with `gain` and rotated; cache [pages][PAGE][LORA + ROPE], codes if FP8, with scales [pages][PAGE][1 or,
    with ROPE, 2]; out as in `_gqa_kernel`, with LORA for D. BC, BR: LORA and ROPE, up to a power of two.
    """
    enter(EARLY)
    split, block, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    last = tl.load(positions + sequence).to(tl.int32)
    first = split * (SPLIT * PAGE)
    if first > last:
        return
    h = block * BH + tl.arange(0, BH)
    c = tl.arange(0, BC)
    r = tl.arange(0, BR)
    head = sequence * heads + h
    mask_c = (h < heads)[:, None] & (c < LORA)[None, :]
    mask_r = (h < heads)[:, None] & (r < ROPE)[None, :]
    latent_q = tl.load(absorbed + head[:, None] * LORA + c[None, :], mask=mask_c, other=0.0)
    READ: tl.constexpr = tl.bfloat16 if FP8 else cache.dtype.element_ty
    HEADS: tl.constexpr = 2 if ROPE > 0 else 1  # that have scales
    latent_q = latent_q.to(READ)
    of_q = q + sequence * q_row + h[:, None] * q_head + NOPE
    rope_q = tl.load(of_q + r[None, :], mask=mask_r, other=0.0)
    if ROTATED:
        second, pair, other = partners(r[None, :], r[None, :], half, INTERLEAVED)
        inside = r[None, :] < 2 * half
        backend = tl.load(of_q + other, mask=(h < heads)[:, None] & inside, other=0.0)
        rope_q = turned(rope_q, backend, second, pair, inside, inv_freq, last + shift, turn_scale)
    rope_q = rope_q.to(READ)
    peak = tl.full([BH], float("-inf"), tl.float32)
    weight = tl.zeros([BH], tl.float32)
    total = tl.zeros([BH, BC], tl.float32)
    table = pages + sequence * table_width
    for at in range(first, tl.minimum(first + SPLIT * PAGE, last), BL):
        page = tl.load(table + at // PAGE).to(tl.int64)
        place = at % PAGE + tl.arange(0, BL)
        seen = at + tl.arange(0, BL) < last
        rows = cache + (page * PAGE + place)[:, None] * (LORA + ROPE)
        inside_c = seen[:, None] & (c < LORA)[None, :]
        inside_r = seen[:, None] & (r < ROPE)[None, :]
        keys = tl.load(rows + c[None, :], mask=inside_c, other=0.0)
        rope = tl.load(rows + LORA + r[None, :], mask=inside_r, other=0.0)
        if FP8:
            keys, rope = numbers(keys), numbers(rope)
            at_scale = scales + (page * PAGE + place) * HEADS
            unit = units(tl.load(at_scale, mask=seen, other=0))[None, :]
            rope_unit = units(tl.load(at_scale + HEADS - 1, mask=seen, other=0))[None, :]
            scores = tl.dot(rope_q, tl.trans(rope), input_precision="ieee") * rope_unit
            scores += tl.dot(latent_q, tl.trans(keys), input_precision="ieee") * unit
            scores *= scale
        else:
            scores = tl.dot(rope_q, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(latent_q, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - new_peak)
        chance = tl.exp(scores - new_peak[:, None])
        weight = weight * shrink + tl.sum(chance, axis=1)
        total = total * shrink[:, None]
        if FP8:
            chance *= unit
        total = tl.dot(chance.to(READ), keys, total, input_precision="ieee")
        peak = new_peak
    if last < first + SPLIT * PAGE:  # rounded as it is stored, before anybody reads it
        new, new_rope = _new_latent(
            latent, sequence, gain, inv_freq, last + shift, eps, half, turn_scale,
            LORA, ROPE, NORMED, ROTATED, INTERLEAVED, BC, BR,
        )  # fmt: skip
        page = tl.load(table + last // PAGE).to(tl.int64)
        stored = page * PAGE + last % PAGE
        to = cache + stored * (LORA + ROPE)
        of_latent, of_rope = c < tl.where(block == 0, LORA, 0), r < tl.where(block == 0, ROPE, 0)
        if FP8:
            code, byte = coded(new, c < LORA)
            rope_code, rope_byte = coded(new_rope, r < ROPE)
            tl.store(to + c, code.to(tl.uint8), mask=of_latent)
            tl.store(scales + stored * HEADS, byte.to(tl.uint8), mask=block == 0)
            if ROPE > 0:
                tl.store(to + LORA + r, rope_code.to(tl.uint8), mask=of_rope)
                tl.store(scales + stored * HEADS + 1, rope_byte.to(tl.uint8), mask=block == 0)
            new = numbers(code).to(tl.float32) * units(byte)
            new_rope = numbers(rope_code).to(tl.float32) * units(rope_byte)
        else:
            new, new_rope = new.to(READ), new_rope.to(READ)
            tl.store(to + c, new, mask=of_latent)
            tl.store(to + LORA + r, new_rope, mask=of_rope)
        score = tl.sum(rope_q.to(tl.float32) * new_rope.to(tl.float32)[None, :], axis=1)
        score += tl.sum(latent_q.to(tl.float32) * new.to(tl.float32)[None, :], axis=1)
        score *= scale
        new_peak = tl.maximum(peak, score)
        shrink = tl.exp(peak - new_peak)
        chance = tl.exp(score - new_peak)
        weight = weight * shrink + chance
        total = total * shrink[:, None] + chance[:, None] * new.to(tl.float32)[None, :]
        peak = new_peak
    at_split = head * tl.num_programs(0) + split
    tl.store(peaks + at_split, peak, mask=h < heads)
    tl.store(weights + at_split, weight, mask=h < heads)
    tl.store(sums + at_split[:, None] * LORA + c[None, :], total, mask=mask_c)


@triton.jit
def _merge_kernel(
    sums, peaks, weights, positions, sinks, out, n_splits, heads, window,
    SINKS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of the splits of a head into out[sequence][head][D], BS at a time, first to last.

    SPAN: positions of a split. sinks [heads]: if SINKS, one more score of each head, of a value 0. Grid (blocks
    of D, heads, sequences).
    """
    enter(EARLY)
    head, sequence = tl.program_id(1), tl.program_id(2)
    last = tl.load(positions + sequence).to(tl.int32)
    begin, used = _lowest(last, window) // SPAN, last // SPAN + 1
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    row = (sequence.to(tl.int64) * heads + head) * n_splits
    peak = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    if SINKS:
        peak = tl.zeros([1], tl.float32) + tl.load(sinks + head)
        weight = tl.full([1], 1.0, tl.float32)
    total = tl.zeros([BD], tl.float32)
    for at in range(begin // BS * BS, used, BS):
        s = at + tl.arange(0, BS)
        there = (s >= begin) & (s < used)
        peak_s = tl.load(peaks + row + s, mask=there, other=float("-inf"))
        weight_s = tl.load(weights + row + s, mask=there, other=0.0)
        inside = there[:, None] & (d < D)[None, :]
        sums_s = tl.load(sums + (row + s)[:, None] * D + d[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peak_s, axis=0))
        shrink = tl.exp(peak - new_peak)
        grow = tl.exp(peak_s - new_peak)
        weight = weight * shrink + tl.sum(weight_s * grow, axis=0)
        total = total * shrink + tl.sum(sums_s * grow[:, None], axis=0)
        peak = new_peak
    to = out + (sequence.to(tl.int64) * heads + head) * D + d
    tl.store(to, total / weight, mask=d < D)


def append(cache: Pages, new: Tensor, rows: Rows) -> None:
    """Writes the rows `new` [T, width] to the cached pages [pages, 64, width…] at their positions, encoded if the cache
    is fp8.
    """
    if isinstance(cache, ScaledPages):
        return append_scaled(cache, new, rows)
    width = new.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _append_kernel[(triton.cdiv(width, block), new.shape[0])](
        new, cache, rows.positions, rows.pages, new.stride(0), width, rows.pages.shape[1], rows.run,
        PAGE=PAGE_TOKENS, BLOCK=block, **early(new),
    )  # fmt: skip


def gqa_one(
    q: Tensor, cache: KvPages, rows: Rows, shape: GqaShape, sinks: Tensor | None = None
) -> Tensor:
    """Returns grouped-query attention of one query per sequence, q [sequences, heads * D], over the cached
    positions up to its own: [sequences, heads * value_dim] f32."""
    s = shape
    group = s.heads // s.kv_heads
    parts = _Parts(rows, s.heads, s.value_dim, GQA_SPLIT_PAGES)
    (keys, k_scales), (values, v_scales) = map(memory_of, cache)
    width, wide = triton.next_power_of_2(s.head_dim), triton.next_power_of_2(s.value_dim)
    _gqa_kernel[(parts.splits, s.kv_heads, q.shape[0])](
        q, keys, values, k_scales, v_scales, rows.positions, rows.pages, parts.sums, parts.peaks, parts.weights,
        q.stride(0), rows.pages.shape[1], group, s.scale, _window(s),
        D=s.head_dim, DV=s.value_dim, FP8=k_scales is not None, PAGE=PAGE_TOKENS, SPLIT=GQA_SPLIT_PAGES,
        BH=max(16, triton.next_power_of_2(group)), BD=max(16, width), BV=max(16, wide),
        BL=64 if max(width, wide) <= 128 else 32, num_stages=2, **early(q),
    )  # fmt: skip
    return parts.merged(rows, _window(s), sinks)


def _window(shape: GqaShape) -> int:
    """Returns the window as kernels are told it: below 0 for one that begins at a multiple of it; 0: there is none."""
    return -shape.window if shape.chunked else shape.window


def mla_one(
    absorbed: Tensor, q: Tensor, latent: Latent, cache: Pages, rows: Rows, shape: MlaShape
) -> Tensor:
    """Appends the latent to the cache, and returns the output of absorbed latent attention of one query per sequence,
    before its product with `uv`: [sequences, heads * lora] f32.

    Args:
        absorbed: [sequences, heads, lora] f32, the queries multiplied by `uk_in`.
        q: [sequences, heads * (nope + rope)], `latent.q` added up; the last `rope` columns of each head are read.
    """
    s, rope = shape, latent.rope or Rope(0, ())
    parts = _Parts(rows, s.heads, s.lora, MLA_SPLIT_PAGES)
    width = triton.next_power_of_2(s.lora)
    codes, scales = memory_of(cache)
    _mla_kernel[(parts.splits, triton.cdiv(s.heads, _MLA_HEADS), q.shape[0])](
        absorbed, q, Sum.of(latent.latent), latent.gain, frequencies(rope, q.device), codes, scales,
        rows.positions, rows.pages, parts.sums, parts.peaks, parts.weights,
        q.stride(0), s.nope + s.rope, rows.pages.shape[1], s.heads, s.scale,
        latent.eps, rope.dim // 2, float(rope.scale), rope.shift,
        NORMED=latent.gain is not None, ROTATED=latent.rope is not None, INTERLEAVED=rope.interleaved,
        FP8=scales is not None,
        NOPE=s.nope, LORA=s.lora, ROPE=s.rope, PAGE=PAGE_TOKENS, SPLIT=MLA_SPLIT_PAGES,
        BH=_MLA_HEADS, BC=max(16, width), BR=max(16, triton.next_power_of_2(s.rope)),
        BL=64 if width <= 128 else 32,
        num_warps=4 if width <= 256 else 8, num_stages=2, **early(q),
    )  # fmt: skip
    return parts.merged(rows)


def attend_latent(
    latent: Latent, uk_in: Packed, uv: Packed, shape: MlaShape, *, rows: Rows, cache: tuple[Pages]
) -> Tensor:
    """Rotates queries, norms and rotates the latent, appends it to the cache, and returns the output of latent
    attention of one row of each sequence, [sequences, heads * v] f32."""
    s, q = shape, sum_parts(latent.q)
    heads = torch.unflatten(q, -1, (s.heads, s.nope + s.rope))
    absorbed = _of_heads(heads[..., : s.nope], uk_in)
    mixed = mla_one(absorbed, q, latent, *cache, rows, s)
    return _of_heads(mixed.view(q.shape[0], s.heads, s.lora), uv).flatten(1)


def _of_heads(x: Tensor, w: Packed) -> Tensor:
    """The product of each head's rows, x [S, heads, K], with its own matrix -> [S, heads, N]."""
    made = vector_products(x, w)
    return made if w.update is None else made.add_(w.update.of_heads(x))


class _Parts:
    """The partial results of all splits of all heads.

    Attributes:
        splits: the number of splits of a sequence, as many as its page table has room for.
        sums [sequences, heads, splits, width], peaks and weights [sequences, heads, splits]: f32.
    """

    def __init__(self, rows: Rows, heads: int, width: int, split_pages: int) -> None:
        sequences, pages = rows.pages.shape
        self.heads, self.width, self.span = heads, width, split_pages * PAGE_TOKENS
        self.splits = triton.cdiv(pages, split_pages)
        places = (sequences, heads, self.splits)
        self.sums = torch.empty(*places, width, dtype=torch.float32, device=rows.pages.device)
        self.peaks = torch.empty(places, dtype=torch.float32, device=rows.pages.device)
        self.weights = torch.empty_like(self.peaks)

    def merged(self, rows: Rows, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        """Merges the splits -> [sequences, heads * width] f32."""
        sequences = self.peaks.shape[0]
        out = self.sums.new_empty(sequences, self.heads * self.width)
        block = min(128, max(16, triton.next_power_of_2(self.width)))
        _merge_kernel[(triton.cdiv(self.width, block), self.heads, sequences)](
            self.sums, self.peaks, self.weights, rows.positions, sinks, out,
            self.splits, self.heads, window,
            SINKS=sinks is not None, D=self.width, SPAN=self.span, BS=_MERGED_SPLITS, BD=block, **early(out),
    )  # fmt: skip
        return out
