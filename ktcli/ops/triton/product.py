"""Products of few rows with packed weights: bandwidth, and nothing but bandwidth. Not yet run on a GPU.

The arithmetic behind the shape of the kernels, for an H200 (132 SMs at 1.75 GHz, 4.8 TB/s) and int4 in
groups of 64, 0.53 bytes per weight:

  Bytes in flight. 4.8 TB/s over about 0.7 us of latency are 3.4 MB, 25 kB per SM. A program has 128 threads,
  which read two panels, a tile of 64 lines (4 kB) of each, while the tiles before are multiplied: 16 kB.
  At 128 registers per thread, four programs fit on an SM: up to 64 kB in flight.
  Instructions. 9.0e12 weights/s at full bandwidth, 30e12 lanes/s: 3.3 instructions per weight, 4.7 at 70 %.
  The loop of `_gate_up_kernel` has 920 for 256 weights (sm_90, ptxas of Triton 3.9): 3.6. A logical operation
  and 0.6 shifts decode, one fused multiply-add, the rest loads, scales and moves. Hence one row of activations
  per program: two would take 4.6, and tensor cores win (`tiles`). int8 takes 4.0 and
  fp8 6.8, where 70 % leave 8.9.
  Integer instructions go at half that rate: 1.6 per weight, which is all there is at full bandwidth.
  Activations are read from L1: 8 wavefronts for two times 4 of weights.
  Programs. Gate and up of DeepSeek-V3's 8 experts are 8 * 128 pairs of panels of 122 kB, down 8 * 224 of
  35 kB: 1024 and 1792 for 528 places; what is left of the last round still fills the queues.
  Where a matrix has few rows, its columns are split as well, into parts that depend on the shape alone.

Sums: a thread adds its lines in ascending order, then the threads of a row as the tree of tl.sum, then whoever
reads the product its parts, or the slots of a token, in order (`sums`). Nothing depends on the number of rows, of
programs or of SMs, and there are no atomics: same inputs, same bits.
Activations are read as they are, in f32; only `tiles` rounds to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.ops.torch.packed import NO_EXTRAS, Extras, Packed
from ktcli.ops.torch.parts import Parts
from ktcli.ops.triton.panels import (
    column_of,
    panel_arguments,
    raw_code,
    scale_value,
    scales_of,
    words_and_scales,
    zero_of,
)
from ktcli.ops.triton.small import activated, glu_arguments
from ktcli.ops.triton.sums import sum_parts

_LINES = 64  # of one tile at most; fewer than the 128 threads, so that x is read where it is used
# Programs that are wanted: 4 per SM of the largest GPU considered, 132 SMs. A constant, so that bits do not depend on
# the GPU.
_PROGRAMS = 528


@triton.jit
def _load_pair(
    words, scales, second, at, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, L: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Loads the tile of lines [at, at + L) of two panels: words, scales, and scales of the odd codes where these
    differ (else something small). It is zero behind `last`; if EVEN, tiles are whole and what lies behind is not
    used."""
    rows = tl.arange(0, 16)[None, :]
    lines = at + tl.arange(0, L)[:, None]
    if EVEN:
        inside = (at + tl.zeros([L, 1], tl.int32)) < last
    else:
        inside = lines < last
    a = words + lines * 16 + rows
    b = a + second * (PANEL_BYTES // 4)
    if EVEN:  # no zeros: they cost a move per register
        wa = tl.load(a, mask=inside)
        wb = tl.load(b, mask=inside)
    else:
        wa = tl.load(a, mask=inside, other=0)
        wb = tl.load(b, mask=inside, other=0)
    sa = tl.zeros([1, 1], tl.float32)
    sb = sa
    ta = sa
    tb = sa
    if GROUP != 0:
        scales_b = scales + second * (PANEL_BYTES // SCALE_BYTES)
        sa = scales_of(scales, lines, rows, inside, 0, BITS, GROUP, SCALE_BYTES, COLUMNS)
        sb = scales_of(scales_b, lines, rows, inside, 0, BITS, GROUP, SCALE_BYTES, COLUMNS)
        if BITS == 4 and GROUP == 32:
            ta = scales_of(scales, lines, rows, inside, 1, BITS, GROUP, SCALE_BYTES, COLUMNS)
            tb = scales_of(scales_b, lines, rows, inside, 1, BITS, GROUP, SCALE_BYTES, COLUMNS)
    return wa, wb, sa, sb, ta, tb


@triton.jit
def _multiply_pair(
    total_a, total_b, wa, wb, sa, sb, ta, tb, x, n_columns, at, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr,
    BOOK_HIGH: tl.constexpr, L: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Returns total_a, total_b [L, 16] plus a tile from `_load_pair` times x, which every line adds by itself."""
    lines = tl.arange(0, L)[:, None]
    # Both behind the tile's first line, so that columns within a tile are the same in every round.
    x += at * (32 // BITS)
    columns_left = n_columns - at * (32 // BITS)
    sum_a = tl.zeros([L, 16], tl.float32)
    sum_b = tl.zeros([L, 16], tl.float32)
    # What raw codes add to a sum: a number per line, not per weight.
    zeros = tl.zeros([L, 1], tl.float32)
    zero = n_columns >> 31  # see raw_code
    odd_a = sum_a
    odd_b = sum_b
    odd_zeros = zeros
    for n in tl.static_range(32 // BITS):
        column = column_of(lines, n, BITS)
        if EVEN:
            xn = tl.load(x + column)
        else:
            xn = tl.load(x + column, mask=(lines + at < last) & (column < columns_left), other=0.0)
        va = raw_code(wa, zero, n, BITS, BOOK_LOW, BOOK_HIGH) * xn
        vb = raw_code(wb, zero, n, BITS, BOOK_LOW, BOOK_HIGH) * xn
        if (BITS == 4 and GROUP == 32) and n % 2 == 1:  # Triton 3.2 chains no more than two
            odd_a += va
            odd_b += vb
            odd_zeros += zero_of(n, BITS, BOOK_LOW, BOOK_HIGH) * xn
        else:
            sum_a += va
            sum_b += vb
            zeros += zero_of(n, BITS, BOOK_LOW, BOOK_HIGH) * xn
    if BITS <= 8 and BOOK_LOW == 0:
        sum_a -= zeros
        sum_b -= zeros
        odd_a -= odd_zeros
        odd_b -= odd_zeros
    if BITS == 8 and BOOK_LOW == -1:
        sum_a *= 256.0
        sum_b *= 256.0
    if GROUP != 0:
        total_a += sum_a * scale_value(sa, SCALE_BYTES)
        total_b += sum_b * scale_value(sb, SCALE_BYTES)
    else:
        total_a += sum_a
        total_b += sum_b
    if BITS == 4 and GROUP == 32:
        total_a += odd_a * scale_value(ta, SCALE_BYTES)
        total_b += odd_b * scale_value(tb, SCALE_BYTES)
    return total_a, total_b


@triton.jit
def _pair_sums(
    x, n_columns, words, scales, second, first, last,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr, L: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the sums [16] of two panels over lines [first, last), times x.

    words, scales: first byte of the first panel. second: from it to the other, in panels.
    EVEN: last - first is a multiple of 2 L, and x has COLUMNS columns.
    """
    total_a = tl.zeros([L, 16], tl.float32)
    total_b = tl.zeros([L, 16], tl.float32)
    wa, wb, sa, sb, ta, tb = _load_pair(
        words, scales, second, first, last, BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, L, EVEN
    )
    # The next tile is under way while one is multiplied; two by turns, so that none is moved.
    for at in range(first, last, 2 * L):
        xa, xb, ya, yb, za, zb = _load_pair(
            words, scales, second, at + L, last,
            BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, L, EVEN,
        )  # fmt: skip
        total_a, total_b = _multiply_pair(
            total_a, total_b, wa, wb, sa, sb, ta, tb, x, n_columns, at, last,
            BITS, GROUP, SCALE_BYTES, BOOK_LOW, BOOK_HIGH, L, EVEN,
        )  # fmt: skip
        wa, wb, sa, sb, ta, tb = _load_pair(
            words, scales, second, at + 2 * L, last,
            BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, L, EVEN,
        )  # fmt: skip
        total_a, total_b = _multiply_pair(
            total_a, total_b, xa, xb, ya, yb, za, zb, x, n_columns, at + L, last,
            BITS, GROUP, SCALE_BYTES, BOOK_LOW, BOOK_HIGH, L, EVEN,
        )  # fmt: skip
    whole_a = tl.sum(total_a, axis=0)
    whole_b = tl.sum(total_b, axis=0)
    if GROUP == 0 and SCALE_BYTES != 0:
        scale = scales + 2 * COLUMNS * BITS // SCALE_BYTES + tl.arange(0, 16)
        whole_a *= scale_value(tl.load(scale), SCALE_BYTES)
        whole_b *= scale_value(tl.load(scale + second * (PANEL_BYTES // SCALE_BYTES)), SCALE_BYTES)
    return whole_a, whole_b


@triton.jit
def matrix_of(ids, slots, at):
    """Returns the matrix of the stacks that slot `at` of a routing means; negative: none that is here."""
    expert = tl.load(ids + at)
    matrix = tl.load(slots + tl.maximum(expert, 0))
    return tl.where(expert < 0, -1, matrix)


@triton.jit
def _product_kernel(
    x, words, scales, ids, slots, out, n_rows, n_columns, x_row, x_part, parts, span,
    ROUTED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr, L: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Computes out[job, split] [n_rows]: lines [split * span, + span) of a matrix, times the x of the job.

    Grid (pairs of panels, splits, jobs). Job j reads x + j / parts * x_row + j % parts * x_part and matrix
    j % parts; if ROUTED the matrix that slot j chose, and nothing is written where that is not here.
    """
    pair, split, job = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    matrix = job % parts
    if ROUTED:
        matrix = matrix_of(ids, slots, job)
        if matrix < 0:
            return
    panels = tl.cdiv(n_rows, 16)
    panel = matrix.to(tl.int64) * panels + pair * 2
    second = tl.where(pair * 2 + 1 < panels, 1, 0)  # of an odd number, the last is read twice
    LAST: tl.constexpr = COLUMNS * BITS // 32
    first = split * span
    last = tl.minimum(first + span, LAST)
    if SCALE_BYTES != 0:
        scales += panel * (PANEL_BYTES // SCALE_BYTES)
    one, two = _pair_sums(
        x + (job // parts).to(tl.int64) * x_row + job % parts * x_part, n_columns,
        words + panel * (PANEL_BYTES // 4), scales, second, first, last,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, L, EVEN,
    )  # fmt: skip
    row = pair * 32 + tl.arange(0, 16)
    to = out + (job.to(tl.int64) * tl.num_programs(1) + split) * n_rows
    tl.store(to + row, one, mask=row < n_rows)
    tl.store(to + row + 16, two, mask=row + 16 < n_rows)


@triton.jit
def _gate_up_kernel(
    x, words, scales, ids, slots, bias, out, n_rows, n_columns, x_row, top_k, bias_row,
    alpha, limit, shift, top,
    BIASED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr, L: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Computes out[job] [n_rows / 2]: the activation of the matrix that slot `job` chose, times its token's x, + the
    bias of its expert if BIASED.

    Grid (pairs of a gate and an up panel, jobs). bias [E][bias_row]
    """
    pair, job = tl.program_id(0), tl.program_id(1)
    matrix = matrix_of(ids, slots, job)
    if matrix < 0:
        return
    panel = matrix.to(tl.int64) * (n_rows // 16) + pair * 2
    if SCALE_BYTES != 0:
        scales += panel * (PANEL_BYTES // SCALE_BYTES)
    gate, up = _pair_sums(
        x + (job // top_k).to(tl.int64) * x_row, n_columns,
        words + panel * (PANEL_BYTES // 4), scales, 1, 0, COLUMNS * BITS // 32,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, L, EVEN,
    )  # fmt: skip
    if BIASED:
        bias += tl.load(ids + job).to(tl.int64) * bias_row + pair * 32 + tl.arange(0, 16)
        gate += tl.load(bias)
        up += tl.load(bias + 16)
    to = out + job.to(tl.int64) * (n_rows // 2) + pair * 16 + tl.arange(0, 16)
    tl.store(to, activated(gate, up, alpha, limit, shift, top))


def vector_product(x: Tensor, w: Packed, bias: Tensor | None = None) -> Parts:
    """Multiplies x [T, K] by matrix 0 of w, + bias [N] -> a sum [T, N]; one row at a time."""
    return Parts(_products(x, w, (x.stride(0), 0, 1)), beside=bias)


def vector_products(x: Tensor, w: Packed) -> Tensor:
    """Multiplies x [T, count, K] by the matrix of its place -> [T, count, N] f32."""
    rows, count, _ = x.shape
    parts = Parts(_products(x, w, (x.stride(0), x.stride(1), count)))
    return sum_parts(parts).view(rows, count, w.n)


def vector_experts(
    x: Tensor,
    ids: Tensor,
    gate: Tensor,
    slots: Tensor,
    gate_up: Packed,
    down: Packed,
    extras: Extras = NO_EXTRAS,
) -> Parts:
    """Computes gate * down(swiglu(gate_up x)) of each slot -> a sum [T, H], without the bias of down.

    x [T, H]; ids int32 [T, K]; gate f32 [T, K]; slots int32 [E]: see `functions.experts`.
    """
    rows, top_k = ids.shape
    inner = torch.empty(rows * top_k, gate_up.n // 2, dtype=torch.float32, device=x.device)
    bias = extras.gate_up_bias
    arguments: dict[str, Any] = panel_arguments(gate_up)
    lines = arguments["COLUMNS"] * gate_up.format.bits // 32
    _gate_up_kernel[(gate_up.n // 32, rows * top_k)](
        x, *words_and_scales(gate_up), ids, slots, bias, inner,
        gate_up.n, gate_up.k, x.stride(0), top_k, 0 if bias is None else bias.stride(0),
        *glu_arguments(extras.glu), BIASED=bias is not None,
        **arguments, L=tile_lines(arguments), EVEN=even_tiles(gate_up.k, arguments, lines),
    )  # fmt: skip
    parts = _products(inner, down, (inner.stride(0), 0, 1), (ids, slots), splits=1)
    return Parts(parts.view(rows, top_k, down.n), (ids, slots, gate))


def _products(
    x: Tensor,
    w: Packed,
    strides: tuple[int, int, int],
    routed: tuple[Tensor, Tensor] | None = None,
    splits: int = 0,
) -> Tensor:
    """Returns the results [jobs, splits, N] of `_product_kernel`; strides: x_row, x_part, parts; splits 0: as many
    as fill a GPU."""
    arguments: dict[str, Any] = panel_arguments(w)
    tile = tile_lines(arguments)
    lines = arguments["COLUMNS"] * w.format.bits // 32
    pairs = triton.cdiv(w.n, 32)
    span = span_lines(lines, tile, pairs * strides[2]) if splits == 0 else lines
    splits = triton.cdiv(lines, span)
    jobs = x.shape[0] * strides[2]
    out = torch.empty(jobs, splits, w.n, dtype=torch.float32, device=x.device)
    ids, slots = routed or (None, None)
    _product_kernel[(pairs, splits, jobs)](
        x, *words_and_scales(w), ids, slots, out, w.n, w.k, *strides, span,
        ROUTED=routed is not None, **arguments, L=tile, EVEN=even_tiles(w.k, arguments, span),
    )  # fmt: skip
    return out


def tile_lines(arguments: dict[str, int]) -> int:
    """Returns the number of lines of a tile: 64, or half the power of two that holds a short panel."""
    lines = arguments["COLUMNS"] * arguments["BITS"] // 32
    return min(_LINES, max(8, int(triton.next_power_of_2(lines)) // 2))


def even_tiles(columns: int, arguments: dict[str, int], span: int) -> bool:
    """Tells whether splits of `span` lines are whole pairs of tiles, and need no masks."""
    lines = arguments["COLUMNS"] * arguments["BITS"] // 32
    pair = 2 * tile_lines(arguments)
    return columns == arguments["COLUMNS"] and lines % pair == 0 and span % pair == 0


def span_lines(lines: int, tile: int, pairs: int) -> int:
    """Returns the number of lines of one split, a multiple of two tiles: enough splits for _PROGRAMS programs."""
    wanted = max(1, min(_PROGRAMS // pairs, lines // (2 * tile)))
    return int(triton.cdiv(triton.cdiv(lines, wanted), 2 * tile)) * 2 * tile
