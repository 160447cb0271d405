"""Products of several rows with packed weights: tiles of weights decoded to bf16, for tensor cores.

Three ways lead to a product. One row: `product`. Two to TILE_ROWS rows: here, where a weight is decoded
once for all rows of a tile. More: the matrix is unpacked to bf16 and cuBLAS multiplies; unpacking moves 2.5
bytes per weight, 0.5 ps, against 2.5 fs per row and weight of multiplying (790 TFLOP/s): as much at 200 rows,
a tenth at 2000, and no kernel of ours has to be as good as cuBLAS. Not so the experts of a prefill: 256 of
them share the rows, 64 each of a chunk of 2048, and unpacking all would cost four times reading them. They
stay here at any length, grouped by expert.

The order of columns within a sum is free, so codes are not brought into theirs: all first codes of a tile's
words make one operand, all second codes the next. The activations follow them, in one of two ways with the same
bits. Up to DIRECT_ROWS rows, where launches count, a program loads rows as they are, 4 columns at a time, rounds them
and takes them apart in registers (`_operands`). Of more, and of rows that many experts read, `in_word_order` first
writes x [R, K] as bf16 [R][n][line], where code n of a word of `line` is multiplied with [n][line]: two kernels of
torch, but half the bytes from L2, of which a program reads 4 per row and column in f32, and 64 of weights in int8.
Weights are rounded to bf16 after scaling, as unpacking rounds them; sums are f32.
Nothing depends on how many rows there are, except the bits of a tile's shape (16, 32 or 64 rows).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.ops.torch.merged import Parts
from ktcli.ops.torch.packed import Packed, PackedStack
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.panels import (
    code_of,
    column_of,
    first_scale,
    lines_of,
    panel_arguments,
    scale_value,
    scales_of,
    words_and_scales,
    words_of,
)
from ktcli.ops.triton.small import activated, glu_arguments, unrotated
from ktcli.ops.triton.sums import sum_parts
from ktcli.records import dataclass

TILE_ROWS = 64  # up to this many rows of x, a product is made here
DIRECT_ROWS = 16  # up to this many, x is read as it is: one kernel for each product of a step
# Tokens of `tile_experts` at once: [2048 * K, H] f32 of partial results are 0.5 GB for DeepSeek-V3.
CHUNK_TOKENS = 2048
_WEIGHT_ROWS = 64  # of a matrix, for one program
_SPLIT_LINES = 128  # a split of columns is a multiple, and so of every tile's lines
_PROGRAMS = 264  # wanted: 2 per SM; see `product`


@triton.jit
def _operands(
    of, lines, taken, x_columns, HALF: tl.constexpr, RUN: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, BT: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Returns what RUN codes of the words of `lines` are multiplied with, [BT, L] each: neighbours in the rows at `of`
    [BT], rounded to nearest even; 0 from x_columns on and where not taken. HALF: of 4 bits, even (0) or odd codes."""
    columns = column_of(lines, HALF, BITS)[None, :, None] + tl.arange(0, RUN)[None, None, :]
    inside = taken[:, None, None] & (columns < x_columns)
    run = tl.load(of[:, None, None] + columns, mask=inside, other=0.0).to(DTYPE)
    if RUN == 1:
        return (tl.reshape(run, (BT, L)),)
    elif RUN == 2:
        return tl.split(run)
    else:
        even, odd = tl.split(tl.reshape(run, (BT, L, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _tile_sums(
    x, x_row, x_columns, x_rows, taken, words, scales, panels, first, last,
    STEP: tl.constexpr, ORDERED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Returns sums [BT, BN] over lines [first, last): rows x_rows [BT] of x, where taken, times BN / 16 panels.

    x: rows of x_columns, x_row apart; if ORDERED in word order and of `operand_type`. words, scales: first byte of the
    first panel; the next is STEP panels on; `panels` of them, at most, are there. first and last are multiples of L, or
    the last line.
    """
    LINES: tl.constexpr = COLUMNS * BITS // 32
    HALVES: tl.constexpr = 2 if BITS == 4 else 1  # of the codes of a word: even and odd ones
    RUN: tl.constexpr = 32 // BITS // HALVES
    DTYPE: tl.constexpr = tl.float32 if BITS == 32 else tl.bfloat16  # see operand_type
    r = tl.arange(0, BN)[None, :]
    here = r // 16 < panels
    step = r // 16 * STEP
    of = x + x_rows.to(tl.int64) * x_row
    sums = tl.zeros([BT, BN], tl.float32)
    for at in range(first, last, L):
        lines = at + tl.arange(0, L)
        inside = (lines < LINES)[:, None] & here
        at_words = words + step * (PANEL_BYTES // 4)
        w = words_of(at_words, lines[:, None], r % 16, inside, False, BITS, BOOK_LOW)
        for half in tl.static_range(HALVES):
            if GROUP != 0 and (half == 0 or GROUP == 32):
                at_scales = step * (PANEL_BYTES // SCALE_BYTES) + r % 16
                raw = scales_of(
                    scales, lines[:, None], at_scales, inside, half, BITS, GROUP, SCALE_BYTES, COLUMNS,
                    BOOK_LOW,
                )  # fmt: skip
                scale = scale_value(raw, SCALE_BYTES)
            if not ORDERED:
                own = _operands(of, lines, taken, x_columns, half, RUN, DTYPE, BITS, BT, L)
            for number in tl.static_range(RUN):
                value = code_of(w, number * HALVES + half, BITS, BOOK_LOW, BOOK_HIGH)
                if GROUP != 0:
                    value *= scale
                if ORDERED:
                    at_x = (number * HALVES + half) * LINES + lines
                    there = taken[:, None] & (lines < LINES)[None, :]
                    xn = tl.load(of[:, None] + at_x[None, :], mask=there, other=0.0)
                else:
                    xn = own[number]
                sums = tl.dot(xn, value.to(DTYPE), sums, input_precision="ieee")
    if GROUP == 0 and SCALE_BYTES != 0:
        scale = scales + first_scale(SCALE_BYTES, COLUMNS, BITS, BOOK_LOW)
        scale += step * (PANEL_BYTES // SCALE_BYTES)
        sums *= scale_value(tl.load(scale + r % 16, mask=here, other=0), SCALE_BYTES)
    return sums


@triton.jit
def _tile_kernel(
    x, words, scales, out, x_row, x_columns, n_jobs, n_rows, span,
    ORDERED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, L: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Computes out[row of x, split] [n_rows]; for x see `_tile_sums`. Grid (blocks of weight rows, blocks of x rows,
    splits of `span` lines)."""
    enter(EARLY)
    block, split = tl.program_id(0), tl.program_id(2)
    panel = (block * (BN // 16)).to(tl.int64)
    if SCALE_BYTES != 0:
        scales += panel * (PANEL_BYTES // SCALE_BYTES)
    x_rows = tl.program_id(1) * BT + tl.arange(0, BT)
    first = split * span
    sums = _tile_sums(
        x, x_row, x_columns, x_rows, x_rows < n_jobs, words + panel * (PANEL_BYTES // 4), scales,
        tl.cdiv(n_rows, 16) - block * (BN // 16), first, tl.minimum(first + span, COLUMNS * BITS // 32),
        1, ORDERED,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, BT, BN, L,
    )  # fmt: skip
    rows = block * BN + tl.arange(0, BN)
    to = (x_rows.to(tl.int64) * tl.num_programs(2) + split)[:, None] * n_rows + rows[None, :]
    tl.store(out + to, sums, mask=(x_rows < n_jobs)[:, None] & (rows < n_rows)[None, :])


@triton.jit
def _expert_gate_up_kernel(
    x, words, scales, tiles, order, ids, bias, out, n_rows, n_columns, top_k, count, bias_row,
    glu,
    BIASED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr,
    OUT_BITS: tl.constexpr, OUT_COLUMNS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Computes out[place]: the activation of the place's matrix times its token's x, + the bias of its expert if
    BIASED, in word order for OUT_BITS.

    Grid (blocks of n_columns = n_rows / 2 of out, tiles); tiles and order: see `Groups`. bias [E][bias_row]
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    matrix = tl.load(tiles + tile * 3)
    if matrix >= count:
        return
    start = tl.load(tiles + tile * 3 + 1)
    places = start + tl.arange(0, BT)
    taken = places < tl.load(tiles + tile * 3 + 2)
    tokens = tl.load(order + places, mask=taken, other=0) // top_k
    panel = matrix.to(tl.int64) * (n_rows // 16) + block * (BN // 8)
    words += panel * (PANEL_BYTES // 4)
    words_up = words + PANEL_BYTES // 4
    scales_up = scales
    if SCALE_BYTES != 0:
        scales += panel * (PANEL_BYTES // SCALE_BYTES)
        scales_up = scales + PANEL_BYTES // SCALE_BYTES
    panels = n_columns // 16 - block * (BN // 16)
    gate = _tile_sums(
        x, COLUMNS, COLUMNS, tokens, taken, words, scales, panels, 0, COLUMNS * BITS // 32,
        2, True,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, BT, BN, L,
    )  # fmt: skip
    up = _tile_sums(
        x, COLUMNS, COLUMNS, tokens, taken, words_up, scales_up, panels, 0, COLUMNS * BITS // 32,
        2, True,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, BT, BN, L,
    )  # fmt: skip
    column = block * BN + tl.arange(0, BN)
    if BIASED:  # one expert for all places of a tile
        bias += tl.load(ids + tl.load(order + start)).to(tl.int64) * bias_row
        at = bias + column // 16 * 32 + column % 16
        gate += tl.load(at, mask=column < n_columns, other=0.0)[None, :]
        up += tl.load(at + 16, mask=column < n_columns, other=0.0)[None, :]
    if OUT_BITS == 4:
        code = column % 4 * 2 + column % 64 // 32
        line = column // 64 * 8 + column % 32 // 4
    else:
        code = column % (32 // OUT_BITS)
        line = column // (32 // OUT_BITS)
    at = code * (OUT_COLUMNS * OUT_BITS // 32) + line
    # Columns from n_columns on are those of padding in `down`, and there is none of it beyond OUT_COLUMNS.
    inside = (column < n_columns) & (column < OUT_COLUMNS)
    to = out + places.to(tl.int64)[:, None] * OUT_COLUMNS + at[None, :]
    value = activated(gate, up, glu)
    tl.store(to, value.to(out.dtype.element_ty), mask=taken[:, None] & inside[None, :])


@triton.jit
def _expert_down_kernel(
    x, words, scales, tiles, order, out, n_rows, count,
    BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr, COLUMNS: tl.constexpr,
    PANEL_BYTES: tl.constexpr, BOOK_LOW: tl.constexpr, BOOK_HIGH: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Computes out[slot of the place] [n_rows]: the place's matrix times row `place` of x. Grid (blocks of n_rows,
    tiles)."""
    block, tile = tl.program_id(0), tl.program_id(1)
    matrix = tl.load(tiles + tile * 3)
    if matrix >= count:
        return
    places = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BT)
    taken = places < tl.load(tiles + tile * 3 + 2)
    panel = matrix.to(tl.int64) * tl.cdiv(n_rows, 16) + block * (BN // 16)
    if SCALE_BYTES != 0:
        scales += panel * (PANEL_BYTES // SCALE_BYTES)
    sums = _tile_sums(
        x, COLUMNS, COLUMNS, places, taken, words + panel * (PANEL_BYTES // 4), scales,
        tl.cdiv(n_rows, 16) - block * (BN // 16), 0, COLUMNS * BITS // 32,
        1, True,
        BITS, GROUP, SCALE_BYTES, COLUMNS, PANEL_BYTES, BOOK_LOW, BOOK_HIGH, BT, BN, L,
    )  # fmt: skip
    slot = tl.load(order + places, mask=taken, other=0)
    rows = block * BN + tl.arange(0, BN)
    to = out + slot.to(tl.int64)[:, None] * n_rows + rows[None, :]
    tl.store(to, sums, mask=taken[:, None] & (rows < n_rows)[None, :])


@dataclass(frozen=True, slots=True)
class Groups:
    """The slots of a routing, grouped by matrix.

    Attributes:
        order: int32 [T * K]: the slot at each place; those whose expert is not here come last.
        tiles: int32 [tiles, 3]: matrix, first place, place behind the last of the matrix. As many as there
            can be; where none is left, the matrix is the number of matrices.
    """

    order: Tensor
    tiles: Tensor


def group_slots(ids: Tensor, slots: Tensor, count: int, tile_rows: int) -> Groups:
    """Returns the chosen experts of ids int32 [T, K] as slots t * K + k, grouped by matrix (`slots` has that of each
    expert, `count` >= 1 is their number) and divided into tiles of `tile_rows` slots. It does not wait for the device.
    """
    expert = ids.flatten()
    matrix = torch.where(expert >= 0, slots[expert.clamp(min=0).long()], -1)
    matrix, order = torch.where(matrix < 0, count, matrix).sort(stable=True)
    numbers = torch.arange(count + 1, dtype=matrix.dtype, device=ids.device)
    starts = torch.searchsorted(matrix, numbers)  # int64 [count + 1]
    tiles = (starts.diff() + tile_rows - 1) // tile_rows
    ends = tiles.cumsum(0)
    most = expert.shape[0] // tile_rows + min(count, expert.shape[0])
    tile = torch.arange(most, device=ids.device)
    of = torch.searchsorted(ends, tile, right=True)
    known = of.clamp(max=count - 1)
    first = starts[known] + (tile - ends[known] + tiles[known]) * tile_rows
    return Groups(order.int(), torch.stack((of, first, starts[known + 1]), 1).int())


def in_word_order(x: Tensor, w: Packed) -> Tensor:
    """Returns x [R, K] with its columns in the order of the codes in w's packed words, padded with zeros to the columns
    of a panel; bf16, or f32 if w has 32 bits.
    """
    arguments = panel_arguments(w)
    padding = arguments["COLUMNS"] - x.shape[1]
    x = x.to(operand_type(w))
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    if arguments["BITS"] == 4:  # code 2j + half of line 8s + i: column 64s + 32 half + 4i + j
        x = x.reshape(x.shape[0], -1, 2, 8, 4).permute(0, 4, 2, 1, 3)
    else:
        x = x.reshape(x.shape[0], -1, 32 // arguments["BITS"]).transpose(1, 2)
    return x.reshape(x.shape[0], -1).contiguous()


def operand_type(w: Packed) -> torch.dtype:
    """Returns the dtype to which products with w round their operands: f32 if w has 32 bits, else bf16."""
    return torch.float32 if w.format.bits == 32 else torch.bfloat16


def tile_product(x: Tensor, w: Packed, bias: Tensor | None = None) -> Parts:
    """Returns x [T, K] times the transpose of matrix 0 of w, + bias [N], as a sum of parts [T, N] that is not yet added
    up.
    """
    x, w = unrotated(x, w)
    arguments: dict[str, Any] = panel_arguments(w)
    lines = lines_of(arguments)
    blocks = triton.cdiv(w.n, _WEIGHT_ROWS)
    wanted = max(1, min(_PROGRAMS // blocks, lines // _SPLIT_LINES))
    span = triton.cdiv(triton.cdiv(lines, wanted), _SPLIT_LINES) * _SPLIT_LINES
    splits = triton.cdiv(lines, span)
    rows = tile_rows(x.shape[0])
    block = tile_block(rows)
    out = torch.empty(x.shape[0], splits, w.n, dtype=torch.float32, device=x.device)
    ordered = x.shape[0] > DIRECT_ROWS
    if ordered:
        x = in_word_order(x, w)
    _tile_kernel[(blocks, triton.cdiv(x.shape[0], rows), splits)](
        x, *words_and_scales(w), out, x.stride(0), x.shape[1], x.shape[0], w.n, span,
        ORDERED=ordered, **arguments, **block, **early(x),
    )  # fmt: skip
    return Parts(out, beside=bias)


def tile_experts(x: Tensor, ids: Tensor, gate: Tensor, stack: PackedStack) -> Tensor:
    """Returns the sum of gate * down(swiglu(gate_up x)) over each row's chosen experts, [T, H] f32, without the bias of
    down; see `functions.experts`.
    """
    done = []
    for first in range(0, x.shape[0], CHUNK_TOKENS):
        of = slice(first, first + CHUNK_TOKENS)
        done.append(_tile_experts(x[of], ids[of], gate[of], stack))
    return done[0] if len(done) == 1 else torch.cat(done)


def _tile_experts(x: Tensor, ids: Tensor, gate: Tensor, stack: PackedStack) -> Tensor:
    """Computes one chunk of `tile_experts`."""
    slots, down, extras = stack.slots, stack.down, stack.extras
    x, gate_up = unrotated(x, stack.gate_up)
    bias = extras.gate_up_bias
    n_tokens, top_k = ids.shape
    places = n_tokens * top_k
    rows = tile_rows(triton.cdiv(places, gate_up.count))
    groups = group_slots(ids, slots, gate_up.count, rows)
    first: dict[str, Any] = panel_arguments(gate_up)
    block = tile_block(rows)
    width = gate_up.n // 2
    inner, bits = _between(places, width, down)
    _expert_gate_up_kernel[(triton.cdiv(width, _WEIGHT_ROWS), groups.tiles.shape[0])](
        in_word_order(x, gate_up), *words_and_scales(gate_up), groups.tiles, groups.order, ids, bias,
        inner, gate_up.n, width, top_k, gate_up.count, 0 if bias is None else bias.stride(0),
        glu_arguments(extras.glu), BIASED=bias is not None, **first,
        OUT_BITS=bits, OUT_COLUMNS=inner.shape[1], **block,
    )  # fmt: skip
    if down.format.rotation:
        inner, down = unrotated(inner, down)
        inner = in_word_order(inner, down)
    second: dict[str, Any] = panel_arguments(down)
    out = torch.empty(n_tokens, top_k, down.n, dtype=torch.float32, device=x.device)
    _expert_down_kernel[(triton.cdiv(down.n, _WEIGHT_ROWS), groups.tiles.shape[0])](
        inner, *words_and_scales(down), groups.tiles, groups.order, out, down.n, down.count,
        **second, **block,
    )  # fmt: skip
    return sum_parts(Parts(out, (ids, slots, gate)))


def _between(places: int, width: int, down: Packed) -> tuple[Tensor, int]:
    """Returns the memory for what the first product of experts leaves to `down`, [places, columns], and the bits of the
    words whose order its columns have: f32 in plain order, as those of 32 bits are, where it is rotated first."""
    device = down.data.device
    if down.format.rotation:
        return torch.empty(places, width, dtype=torch.float32, device=device), 32
    arguments = panel_arguments(down)
    columns = arguments["COLUMNS"]
    make = torch.empty if width >= columns else torch.zeros  # columns of padding are read
    return make(places, columns, dtype=operand_type(down), device=device), arguments["BITS"]


def tile_rows(rows: int) -> int:
    """Returns the number of rows of x that one tile of a product takes, for `rows` rows in all: 16, 32 or 64."""
    return min(TILE_ROWS, max(16, int(triton.next_power_of_2(rows))))


def tile_block(rows: int) -> dict[str, int]:
    """Returns the launch constants of a program with tiles of `rows` (16, 32 or 64) rows, by name: BT (rows), BN (rows
    of the weight), L (the depth of one tl.dot, in lines), num_stages and num_warps.

    They take 64 kB of shared memory, 80 for int4 in groups of 32 with f32 scales.
    """
    lines, stages, warps = {16: (32, 3, 4), 32: (32, 2, 4), 64: (16, 2, 8)}[rows]
    return {
        "BT": rows, "BN": _WEIGHT_ROWS, "L": lines, "num_stages": stages, "num_warps": warps
    }  # fmt: skip
