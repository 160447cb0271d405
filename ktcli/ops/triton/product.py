"""Products of few rows with packed weights, bound only by bandwidth.

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
programs or of SMs, and there are no atomics: same inputs, same bits. An MLP beside experts is summed without splits,
for their programs fill the GPU already.
Activations are read as they are, in f32; only `tiles` rounds to bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import SILU, Glu
from ktcli.ops.torch.merged import Parts
from ktcli.ops.torch.packed import Packed, PackedStack
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.panels import (
    column_of,
    first_scale,
    lines_of,
    panel_arguments,
    raw_code,
    scale_value,
    scales_of,
    words_and_scales,
    words_of,
    zero_of,
)
from ktcli.ops.triton.small import activated, glu_arguments, plain, rotation_of, unrotated
from ktcli.ops.triton.sums import sum_parts

_LINES = 64  # of one tile at most; fewer than the 128 threads, so that x is read where it is used
# Programs that are wanted: 4 per SM of the largest GPU considered, 132 SMs. A constant, so that bits do not depend on
# the GPU.
_PROGRAMS = 528


class Panels(NamedTuple):
    """The kernel arguments of packed matrices: words, scales, rows and columns of each, and compile-time constants,
    see `panels`.

    Attributes:
        lines: the lines of a tile.
        even: splits are whole pairs of tiles, x has as many columns as a panel, and masks are not needed.
    """

    words: Tensor
    scales: Tensor
    n_rows: int
    n_columns: int
    bits: tl.constexpr
    group: tl.constexpr
    scale_bytes: tl.constexpr
    columns: tl.constexpr
    panel_bytes: tl.constexpr
    book_low: tl.constexpr
    book_high: tl.constexpr
    lines: tl.constexpr
    even: tl.constexpr

    @classmethod
    def of(cls, w: Packed, span: int | None = None) -> Panels:
        """Returns the kernel arguments for packed matrices w: their words, scales, sizes and constants. A program reads
        `span` lines of a panel (a split); None: all of them.
        """
        arguments = panel_arguments(w)
        lines = lines_of(arguments)
        known = (
            *arguments.values(),
            tile_lines(arguments),
            even_tiles(w.k, arguments, lines if span is None else span),
        )
        return cls(*words_and_scales(w), w.n, w.k, *map(tl.constexpr, known))


@triton.jit
def _scales(scales, lines, rows, inside, HALF: tl.constexpr, w):
    """Returns `scales_of` for a panel of `Panels` w."""
    return scales_of(
        scales, lines, rows, inside, HALF, w.bits, w.group, w.scale_bytes, w.columns, w.book_low
    )


@triton.jit
def _load_pair(words, scales, second, at, last, w, L: tl.constexpr, EVEN: tl.constexpr):
    """Loads the tile of lines [at, at + L) of two panels: words, scales, and scales of the odd codes where these
    differ (else something small). It is zero behind `last`; if EVEN, tiles are whole and what lies behind is not
    used."""
    rows = tl.arange(0, 16)[None, :]
    lines = at + tl.arange(0, L)[:, None]
    if EVEN:
        inside = (at + tl.zeros([L, 1], tl.int32)) < last
    else:
        inside = lines < last
    words_b = words + second * (w.panel_bytes // 4)
    wa = words_of(words, lines, rows, inside, EVEN, w.bits, w.book_low)
    wb = words_of(words_b, lines, rows, inside, EVEN, w.bits, w.book_low)
    sa = tl.zeros([1, 1], tl.float32)
    sb = sa
    ta = sa
    tb = sa
    if w.group != 0:
        scales_b = scales + second * (w.panel_bytes // w.scale_bytes)
        sa = _scales(scales, lines, rows, inside, 0, w)
        sb = _scales(scales_b, lines, rows, inside, 0, w)
        if w.bits == 4 and w.group == 32:
            ta = _scales(scales, lines, rows, inside, 1, w)
            tb = _scales(scales_b, lines, rows, inside, 1, w)
    return wa, wb, sa, sb, ta, tb


@triton.jit
def _multiply_pair(
    total_a, total_b, wa, wb, sa, sb, ta, tb, x, at, last, w, L: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Returns total_a, total_b [L, 16] plus a tile from `_load_pair` times x, which every line adds by itself."""
    lines = tl.arange(0, L)[:, None]
    # Both behind the tile's first line, so that columns within a tile are the same in every round.
    x += at * (32 // w.bits)
    columns_left = w.n_columns - at * (32 // w.bits)
    sum_a = tl.zeros([L, 16], tl.float32)
    sum_b = tl.zeros([L, 16], tl.float32)
    # What raw codes add to a sum: a number per line, not per weight.
    zeros = tl.zeros([L, 1], tl.float32)
    zero = w.n_columns >> 31  # see raw_code
    odd_a = sum_a
    odd_b = sum_b
    odd_zeros = zeros
    for n in tl.static_range(32 // w.bits):
        column = column_of(lines, n, w.bits)
        if EVEN:
            xn = tl.load(x + column)
        else:
            xn = tl.load(x + column, mask=(lines + at < last) & (column < columns_left), other=0.0)
        va = raw_code(wa, zero, n, w.bits, w.book_low, w.book_high) * xn
        vb = raw_code(wb, zero, n, w.bits, w.book_low, w.book_high) * xn
        if (w.bits == 4 and w.group == 32) and n % 2 == 1:  # Triton 3.2 chains no more than two
            odd_a += va
            odd_b += vb
            odd_zeros += zero_of(n, w.bits, w.book_low, w.book_high) * xn
        else:
            sum_a += va
            sum_b += vb
            zeros += zero_of(n, w.bits, w.book_low, w.book_high) * xn
    if w.bits <= 8 and w.book_low == 0:
        sum_a -= zeros
        sum_b -= zeros
        odd_a -= odd_zeros
        odd_b -= odd_zeros
    if w.bits == 8 and w.book_low == -1:
        sum_a *= 256.0
        sum_b *= 256.0
    if w.group != 0:
        total_a += sum_a * scale_value(sa, w.scale_bytes)
        total_b += sum_b * scale_value(sb, w.scale_bytes)
    else:
        total_a += sum_a
        total_b += sum_b
    if w.bits == 4 and w.group == 32:
        total_a += odd_a * scale_value(ta, w.scale_bytes)
        total_b += odd_b * scale_value(tb, w.scale_bytes)
    return total_a, total_b


@triton.jit
def _pair_sums(x, w, panel, second, first, last):
    """Returns the sums [16] of two panels of `Panels` w over lines [first, last), times x.

    panel: number of the first; second: from it to the other.
    """
    L: tl.constexpr = w.lines
    EVEN: tl.constexpr = w.even
    words, scales = w.words + panel * (w.panel_bytes // 4), w.scales
    if w.scale_bytes != 0:
        scales += panel * (w.panel_bytes // w.scale_bytes)
    total_a = tl.zeros([L, 16], tl.float32)
    total_b = tl.zeros([L, 16], tl.float32)
    wa, wb, sa, sb, ta, tb = _load_pair(words, scales, second, first, last, w, L, EVEN)
    # The next tile is under way while one is multiplied; two by turns, so that none is moved.
    for at in range(first, last, 2 * L):
        xa, xb, ya, yb, za, zb = _load_pair(words, scales, second, at + L, last, w, L, EVEN)
        total_a, total_b = _multiply_pair(
            total_a, total_b, wa, wb, sa, sb, ta, tb, x, at, last, w, L, EVEN
        )
        wa, wb, sa, sb, ta, tb = _load_pair(words, scales, second, at + 2 * L, last, w, L, EVEN)
        total_a, total_b = _multiply_pair(
            total_a, total_b, xa, xb, ya, yb, za, zb, x, at + L, last, w, L, EVEN
        )
    whole_a = tl.sum(total_a, axis=0)
    whole_b = tl.sum(total_b, axis=0)
    if w.group == 0 and w.scale_bytes != 0:
        scale = (
            scales + first_scale(w.scale_bytes, w.columns, w.bits, w.book_low) + tl.arange(0, 16)
        )
        whole_a *= scale_value(tl.load(scale), w.scale_bytes)
        whole_b *= scale_value(
            tl.load(scale + second * (w.panel_bytes // w.scale_bytes)), w.scale_bytes
        )
    return whole_a, whole_b


@triton.jit
def matrix_of(ids, slots, at):
    """Returns the index, among the matrices on the device, of the expert that a routing has at `at`; negative: it is
    not on the device.
    """
    expert = tl.load(ids + at)
    matrix = tl.load(slots + tl.maximum(expert, 0))
    return tl.where(expert < 0, -1, matrix)


@triton.jit
def _store_pair(x, w, matrix, pair, first, last, out):
    """Writes the sums of a pair of panels over lines [first, last) of a matrix, times x, to their rows of out."""
    panels = tl.cdiv(w.n_rows, 16)
    second = tl.where(pair * 2 + 1 < panels, 1, 0)  # of an odd number, the last is read twice
    panel = matrix.to(tl.int64) * panels + pair * 2
    one, two = _pair_sums(x, w, panel, second, first, last)
    row = pair * 32 + tl.arange(0, 16)
    tl.store(out + row, one, mask=row < w.n_rows)
    tl.store(out + row + 16, two, mask=row + 16 < w.n_rows)


@triton.jit
def _product_kernel(x, w, out, x_row, x_part, parts, span, EARLY: tl.constexpr):
    """Computes out[job, split] [n_rows]: lines [split * span, + span) of a matrix of `Panels` w, times the job's x.

    Grid (pairs of panels, splits, jobs). Job j reads x + j / parts * x_row + j % parts * x_part and matrix j % parts.
    """
    enter(EARLY)
    pair, split, job = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = split * span
    last = tl.minimum(first + span, w.columns * w.bits // 32)
    x += (job // parts).to(tl.int64) * x_row + job % parts * x_part
    out += (job.to(tl.int64) * tl.num_programs(1) + split) * w.n_rows
    _store_pair(x, w, job % parts, pair, first, last, out)


@triton.jit
def _down_kernel(
    x, w, ids, slots, out, x_row, inner, mlp, mlp_out, BESIDE: tl.constexpr, EARLY: tl.constexpr
):
    """Computes out[job] [n_rows]: the matrix that slot `job` of a routing chose, times x[job]; nothing where that is
    not here. If BESIDE, also mlp_out [n_rows], the product of `Panels` mlp and inner, by the first programs.

    Grid (pairs of panels, jobs, with one more if BESIDE).
    """
    enter(EARLY)
    pair, job = tl.program_id(0), tl.program_id(1)
    if BESIDE:
        if job == 0:
            _store_pair(inner, mlp, job, pair, 0, mlp.columns * mlp.bits // 32, mlp_out)
            return
        job -= 1
    matrix = matrix_of(ids, slots, job)
    if matrix < 0:
        return
    x += job.to(tl.int64) * x_row
    out += job.to(tl.int64) * w.n_rows
    _store_pair(x, w, matrix, pair, 0, w.columns * w.bits // 32, out)


@triton.jit
def _gate_up_kernel(
    x, w, ids, slots, bias, out, mlp_x, mlp, mlp_out, x_row, top_k, bias_row, glu, mlp_glu,
    BIASED: tl.constexpr, BESIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Computes out[job] [n_rows / 2]: the activation of the matrix of `Panels` w that slot `job` chose, times its
    token's x, + the bias of its expert if BIASED. If BESIDE, also mlp_out, the same of `Panels` mlp and mlp_x, by the
    first programs: its codes may be wider, and who is last should not have begun last.

    Grid (pairs of a gate and an up panel, jobs, with one more if BESIDE). bias [E][bias_row]
    """
    enter(EARLY)
    pair, job = tl.program_id(0), tl.program_id(1)
    if BESIDE:
        if job == 0:
            if pair < mlp.n_rows // 32:
                gate, up = _pair_sums(mlp_x, mlp, pair * 2, 1, 0, mlp.columns * mlp.bits // 32)
                to = mlp_out + pair * 16 + tl.arange(0, 16)
                tl.store(to, activated(gate, up, mlp_glu))
            return
        job -= 1
        if pair >= w.n_rows // 32:
            return
    matrix = matrix_of(ids, slots, job)
    if matrix < 0:
        return
    x += (job // top_k).to(tl.int64) * x_row
    panel = matrix.to(tl.int64) * (w.n_rows // 16) + pair * 2
    gate, up = _pair_sums(x, w, panel, 1, 0, w.columns * w.bits // 32)
    if BIASED:
        bias += tl.load(ids + job).to(tl.int64) * bias_row + pair * 32 + tl.arange(0, 16)
        gate += tl.load(bias)
        up += tl.load(bias + 16)
    to = out + job.to(tl.int64) * (w.n_rows // 2) + pair * 16 + tl.arange(0, 16)
    tl.store(to, activated(gate, up, glu))


def vector_product(x: Tensor, w: Packed, bias: Tensor | None = None) -> Parts:
    """Returns x [T, K] times the transpose of matrix 0 of w, + bias [N], as a sum of parts [T, N] that is not yet added
    up; one row at a time.
    """
    x, w = unrotated(x, w)
    return Parts(_products(x, w, (x.stride(0), 0, 1)), beside=bias)


def vector_products(x: Tensor, w: Packed) -> Tensor:
    """Returns [T, count, N] f32: each row x[t, i] of x [T, count, K] times the transpose of matrix i of w."""
    rows, count, _ = x.shape
    x, w = unrotated(x, w)
    parts = Parts(_products(x, w, (x.stride(0), x.stride(1), count)))
    return sum_parts(parts).view(rows, count, w.n)


def vector_experts(
    x: Tensor,
    ids: Tensor,
    gate: Tensor,
    stack: PackedStack,
    beside: tuple[Packed, Packed, Glu] | None = None,
) -> tuple[Parts, Parts | None]:
    """Returns two sums of parts that are not yet added up: the outputs gate * down(swiglu(gate_up x)) [T, H] of the
    chosen experts, without the bias of down, and the output [1, N] of the MLP `beside`; None: there is no such MLP.

    x [T, H]; ids int32 [T, K]; gate f32 [T, K]: see `functions.experts`. beside: gate_up, down and activation, for x of
    one row.
    """
    slots, gate_up, down, extras = stack.slots, stack.gate_up, stack.down, stack.extras
    rows, top_k = ids.shape
    jobs, own, bias = rows * top_k, x.new_empty, extras.gate_up_bias
    inner, out = own(jobs, gate_up.n // 2), own(rows, top_k, down.n)
    pairs, first, second, mlp_glu = gate_up.n // 32, None, None, SILU
    mlp_x = mlp_inner = mlp_out = narrow = None
    given, rotation = x, rotation_of(gate_up)
    x, gate_up = unrotated(x, gate_up)
    if beside is not None:
        assert rows == 1
        wide, narrow, mlp_glu = beside
        alike = rotation_of(wide) == rotation  # then x is rotated once
        mlp_x, wide = (x, plain(wide)) if alike else unrotated(given, wide)
        first = Panels.of(wide)
        mlp_inner, mlp_out = own(1, wide.n // 2), own(1, 1, narrow.n)
        jobs, pairs = jobs + 1, max(pairs, wide.n // 32)
    _gate_up_kernel[(pairs, jobs)](
        x, Panels.of(gate_up), ids, slots, bias, inner, mlp_x, first, mlp_inner,
        x.stride(0), top_k, 0 if bias is None else bias.stride(0),
        glu_arguments(extras.glu), glu_arguments(mlp_glu),
        BIASED=bias is not None, BESIDE=beside is not None, **early(x),
    )  # fmt: skip
    inner, down = unrotated(inner, down)
    if mlp_inner is not None and narrow is not None:
        mlp_inner, narrow = unrotated(mlp_inner, narrow)
        second = Panels.of(narrow)
    _down_kernel[(triton.cdiv(down.n, 32), jobs)](
        inner, Panels.of(down), ids, slots, out, inner.stride(0), mlp_inner, second, mlp_out,
        BESIDE=beside is not None, **early(x),
    )  # fmt: skip
    made = None if mlp_out is None else Parts(mlp_out)
    return Parts(out, (ids, slots, gate)), made


def _products(x: Tensor, w: Packed, strides: tuple[int, int, int]) -> Tensor:
    """Returns the results [jobs, splits, N] of `_product_kernel`; strides: x_row, x_part, parts."""
    arguments = panel_arguments(w)
    lines = lines_of(arguments)
    pairs = triton.cdiv(w.n, 32)
    span = span_lines(lines, tile_lines(arguments), pairs * strides[2])
    splits = triton.cdiv(lines, span)
    jobs = x.shape[0] * strides[2]
    out = torch.empty(jobs, splits, w.n, dtype=torch.float32, device=x.device)
    _product_kernel[(pairs, splits, jobs)](x, Panels.of(w, span), out, *strides, span, **early(x))
    return out


def tile_lines(arguments: dict[str, int]) -> int:
    """Returns the number of lines of a panel that a product reads at once (a tile): 64, or for a panel of up to 64
    lines half of them, rounded up to a power of two, at least 8.

    Args:
        arguments: the constants that `panel_arguments` returned for the weight.
    """
    lines = lines_of(arguments)
    return min(_LINES, max(8, int(triton.next_power_of_2(lines)) // 2))


def even_tiles(columns: int, arguments: dict[str, int], span: int) -> bool:
    """Returns whether kernels need no masks: x has as many `columns` as a panel, and both the panel and its splits of
    `span` lines are whole pairs of tiles.
    """
    lines = lines_of(arguments)
    pair = 2 * tile_lines(arguments)
    return columns == arguments["COLUMNS"] and lines % pair == 0 and span % pair == 0


def span_lines(lines: int, tile: int, pairs: int) -> int:
    """Returns the number of lines of a panel that one program of a product reads (a split), a multiple of 2 * tile. It
    is chosen so that a product of `pairs` pairs of panels takes about _PROGRAMS programs, if panels are long enough.
    """
    wanted = max(1, min(_PROGRAMS // pairs, lines // (2 * tile)))
    return int(triton.cdiv(triton.cdiv(lines, wanted), 2 * tile)) * 2 * tile
