"""Kernels between the products: norm, rotations, activation and routing, with one program per row or less.

Each is a launch and a round trip to L2; nothing here is worth tuning beyond being one kernel instead of the
five to twenty that torch starts. Rows may be column ranges of wider rows: the row stride is an argument.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import PANEL_ROWS, SILU, Glu
from ktcli.ops.table.experts import GroupScore, Routing
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch import functions
from ktcli.ops.torch.functions import Rows, frequencies
from ktcli.ops.torch.merged import Parts, Sent
from ktcli.ops.torch.packed import Packed, layout
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.sums import Sum, sum_parts, summed

_BLOCK = 1024  # columns of one program, where columns are independent
# Columns of one program, where blocks of columns are rotated, the widest block: 8 a thread of one warp, within which
# they change places without waiting for other warps.
_ROTATED = 256


@triton.jit
def _norm_kernel(
    x, gain, out, x_row, out_row, gain_step, width, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Applies RMSNorm to a run of `width` columns of x; the next run's gains are `gain_step` on. Grid (runs, rows)."""
    enter(EARLY)
    run, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = run * width + columns
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    mean = tl.sum(value * value, axis=0) / width
    scale = 1 / tl.sqrt(mean + eps)
    value = value * scale * tl.load(gain + run * gain_step + columns, mask=inside, other=0.0)
    tl.store(out + row * out_row + at, value, mask=inside)


@triton.jit
def partners(column, place, half, INTERLEAVED: tl.constexpr):
    """Returns three values for each column: whether it is the second of its rotary pair, the number of the pair, and
    the other column of the pair. place: the column's place among those that are rotated.
    """
    if INTERLEAVED:
        second = place % 2 == 1
        pair = place // 2
        other = tl.where(second, column - 1, column + 1)
    else:
        second = place >= half
        pair = tl.where(second, place - half, place)
        other = tl.where(second, column - half, column + half)
    return second, pair, other


@triton.jit
def turned(value, backend, second, pair, inside, inv_freq, position, scale):
    """Returns `value`, columns of a head, after rotary embedding at `position`, where they are `inside` the rotated
    columns, else as it is. backend: the values of the pairs' other columns.
    """
    # In f32, as the models were trained: the angle is rounded before its sine is taken.
    angle = position.to(tl.float32) * tl.load(inv_freq + pair, mask=inside, other=0.0)
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    return tl.where(inside, value * cos + tl.where(second, backend, -backend) * sin, value)


@triton.jit
def _rope_kernel(
    x, positions, inv_freq, out, x_row, n_columns, head_width, first, half, scale,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Copies x to out, with columns [first, first + 2 half) of each head rotated. Grid (blocks of columns, rows).

    A column reads its backend itself: that is in L1, and no column has to know which others share its rotation.
    """
    enter(EARLY)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n_columns
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    place = column % head_width - first
    is_rotated = (place >= 0) & (place < 2 * half) & inside
    second, pair, other = partners(column, place, half, INTERLEAVED)
    backend = tl.load(x + row * x_row + other, mask=is_rotated, other=0.0)
    position = tl.load(positions + row)
    value = turned(value, backend, second, pair, is_rotated, inv_freq, position, scale)
    tl.store(out + row * n_columns + column, value, mask=inside)


@triton.jit
def _hadamard_kernel(
    x, out, x_row, width, columns, factor, STAGES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Computes out [columns]: blocks of 2^STAGES columns of x, 0 from `width` on, times their Hadamard matrix. Grid
    (rows, runs of BLOCK columns).

    A stage adds and subtracts the columns whose numbers differ in the lowest bit, and moves that bit to the top: the
    last leaves all bits where they were. The sums are those of `packed.rotate`, in its order.
    """
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + column, mask=column < width, other=0.0)
    for _ in tl.static_range(STAGES):
        even, odd = tl.split(tl.reshape(value, (BLOCK >> STAGES, (1 << STAGES) // 2, 2)))
        both = tl.join(even + odd, even - odd)  # [block, pair, bit]
        value = tl.reshape(tl.permute(both, (0, 2, 1)), (BLOCK,))
    tl.store(out + row * columns + column, value * factor, mask=column < columns)


@triton.jit
def activated(gate, up, glu):
    """Returns the gated activation of gate and up by kt_glu's formula with the parameters `glu`, see `glu_arguments`;
    NaN stays NaN.
    """
    alpha, limit, shift, top, cubic = glu
    gate = tl.where(gate > top, top, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1 + tl.exp(-alpha * (gate + cubic * gate * gate * gate))) * (up + shift)


def glu_arguments(glu: Glu) -> tuple[float, float, float, float, float]:
    """Returns the kernel arguments of an activation: alpha, the limit of up, the shift of up, the limit of gate, and
    the cubic term's factor; limits may be infinite."""
    limit = glu.limit or float("inf")
    return glu.alpha, limit, glu.shift, glu.gate_limit or limit, glu.cubic


@triton.jit
def _swiglu_kernel(
    x, out, width, glu, RUN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Computes out [width]: the activation of alternating runs of RUN columns of a `Sum` x. Grid (blocks of columns,
    rows)."""
    enter(EARLY)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = column // RUN * (2 * RUN) + column % RUN
    gate, up = summed(x, row, at, inside), summed(x, row, at + RUN, inside)
    value = activated(gate, up, glu)
    tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def _greatest(values, index, allowed, BLOCK: tl.constexpr):
    """Returns (value, index) of the greatest allowed value, the lowest index of equals; one must be allowed."""
    least = float("-inf")
    best = tl.max(tl.where(allowed, values, least), axis=0)
    return best, tl.min(tl.where(allowed & (values == best), index, BLOCK - 1), axis=0)


@triton.jit
def _open_experts(
    rank, expert, n_experts, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP2: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Tells which experts stand in one of the TOPK_GROUP best groups. GROUPS: N_GROUP or more, a power of two."""
    group_of = expert // (n_experts // N_GROUP)
    group = tl.arange(0, GROUPS)
    value = tl.full([GROUPS], float("-inf"), tl.float32)
    for g in tl.static_range(N_GROUP):
        mine = (group_of == g) & (expert < n_experts)
        best, at = _greatest(rank, expert, mine, BLOCK)
        if TOP2:
            others = tl.where(mine & (expert != at), rank, float("-inf"))
            best += tl.max(others, axis=0)
        value = tl.where(group == g, best, value)
    closed = group < N_GROUP
    opened = expert < 0
    for _ in tl.static_range(TOPK_GROUP):
        _best, g = _greatest(value, group, closed, GROUPS)
        closed = closed & (group != g)
        opened = opened | ((group_of == g) & (expert < n_experts))
    return opened


@triton.jit
def choice(
    x, bias, factors, n_experts, scale, band,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP2: tl.constexpr, FACTORED: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns the ids int32 and gates f32, [SLOTS] each, of the experts chosen for a row by the rule of
    kt_program_route; the first TOP_K count. x: the row's logits [BLOCK], -inf from `n_experts` on.
    """
    expert = tl.arange(0, BLOCK)
    known = expert < n_experts
    if SCORE == 1:
        score = 1 / (1 + tl.exp(-x))
    elif SCORE == 2:  # log(1 + e^x), which is x where e^-x no longer counts
        power = tl.exp(tl.minimum(x, 20.0))
        # Below, e^x itself: 1 + e^x would lose it.
        soft = tl.where(power < 1e-4, power - 0.5 * power * power, tl.log(1 + power))
        score = tl.sqrt(tl.where(x > 20.0, x, soft))
    elif SCORE == 3:
        score = x
    else:
        power = tl.exp(x - tl.max(x, axis=0))
        score = power / tl.sum(power, axis=0)
    rank = score
    if BIASED:
        rank = score + tl.load(bias + expert, mask=known, other=0.0)
    # NaN comes last; ids are valid whatever comes.
    rank = tl.where(rank == rank, rank, float("-inf"))
    opened = known
    if N_GROUP > 1:
        opened = _open_experts(rank, expert, n_experts, N_GROUP, TOPK_GROUP, TOP2, BLOCK, GROUPS)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    gate = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best, at = _greatest(rank, expert, opened, BLOCK)
        if SCORE == 3:
            other = tl.where(opened, x, best)
            size = tl.maximum(tl.abs(other), best)
            far = (best - other) / tl.where(size > 0, size, 1.0) > band
            weight = 1 / tl.sum(tl.where(opened & (far == 0), tl.exp(other - best), 0.0), axis=0)
        else:
            weight = tl.sum(tl.where(expert == at, score, 0.0), axis=0)
        opened = opened & (expert != at)
        total += weight
        chosen = tl.where(slot == k, at, chosen)
        gate = tl.where(slot == k, weight, gate)
    if NORMALIZE:
        gate = gate / (total + 1e-20)  # DeepSeek's guard against a zero sum
    gate *= scale
    if FACTORED:
        gate *= tl.load(factors + chosen)
    return chosen, gate


@triton.jit
def write_choice(
    chosen, gate, row, live, ids, gates, to_ids, to_gates,
    TOP_K: tl.constexpr, MASKED: tl.constexpr, SENT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes the ids (-1 if the row is not live and MASKED) and gates of the experts chosen for a row to ids and gates,
    and to to_ids and to_gates in main memory, too, if SENT.
    """
    if MASKED:
        chosen = tl.where(tl.load(live + row) != 0, chosen, -1)
    slot = tl.arange(0, SLOTS)
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(gates + row * TOP_K + slot, gate, mask=slot < TOP_K)
    if SENT:
        tl.store(to_ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
        tl.store(to_gates + row * TOP_K + slot, gate, mask=slot < TOP_K)


@triton.jit
def _route_kernel(
    logits, bias, factors, live, ids, gates, x, to_x, to_ids, to_gates,
    logits_row, n_experts, scale, band, x_row, to_row, hidden,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP2: tl.constexpr, FACTORED: tl.constexpr,
    MASKED: tl.constexpr, SENT: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr, COPIED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of one row by the rule of kt_program_route; -1 in rows that are not live, if MASKED. If SENT,
    it also writes ids, gates and a row of x to main memory.

    Grid (rows, 1, with one more for each COPIED columns of x if SENT). SLOTS: TOP_K or more, a power of two.
    """
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if SENT:
        block = tl.program_id(1)
        if block > 0:
            column = (block - 1) * COPIED + tl.arange(0, COPIED)
            value = tl.load(x + row * x_row + column, mask=column < hidden, other=0.0)
            tl.store(to_x + row * to_row + column, value, mask=column < hidden)
            return
    expert = tl.arange(0, BLOCK)
    known = expert < n_experts
    x = tl.load(logits + row * logits_row + expert, mask=known, other=float("-inf"))
    chosen, gate = choice(
        x, bias, factors, n_experts, scale, band,
        TOP_K, SCORE, BIASED, NORMALIZE, N_GROUP, TOPK_GROUP, TOP2, FACTORED, BLOCK, SLOTS, GROUPS,
    )  # fmt: skip
    write_choice(chosen, gate, row, live, ids, gates, to_ids, to_gates, TOP_K, MASKED, SENT, SLOTS)


def choice_arguments(
    r: Routing, bias: Tensor | None, factors: Tensor | None, live: Tensor | None
) -> dict[str, Any]:
    """Returns the compile-time constants, by name, that `choice` and `write_choice` need for a
    routing: all but SENT.
    """
    return {
        "TOP_K": r.top_k, "SCORE": int(r.score), "BIASED": bias is not None, "NORMALIZE": r.normalize,
        "N_GROUP": r.n_group, "TOPK_GROUP": r.topk_group,
        "TOP2": r.group_score is GroupScore.TOP2 and r.experts > r.n_group,
        "FACTORED": factors is not None, "MASKED": live is not None,
        "BLOCK": max(2, triton.next_power_of_2(r.experts)),
        "SLOTS": max(2, triton.next_power_of_2(r.top_k)),
        "GROUPS": max(2, triton.next_power_of_2(r.n_group)),
    }  # fmt: skip


def norm(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    head_width: int | None = None,
    columns: int | None = None,
    own_gains: bool = False,
) -> Tensor:
    """Returns RMSNorm of each run of W columns of x [T, N], or of its first columns (in place), [T, N]; see
    `functions.norm`.
    """
    out = x if columns is not None else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n = columns or x.shape[1]
    values = x.new_ones(head_width or n) if gain is None else gain
    width = head_width or values.shape[0]
    block = triton.next_power_of_2(width)
    _norm_kernel[(n // width, x.shape[0])](  # a program has read a run before it writes it
        x, values, out, x.stride(0), out.stride(0), width if own_gains else 0, width, eps,
        BLOCK=block, num_warps=8 if block > 2048 else 4, **early(x),
    )  # fmt: skip
    return out


def rope(x: Tensor, rope: Rope, head_width: int, first: int = 0, *, rows: Rows) -> Tensor:
    """Returns x [T, N] with columns [first, first + dim) of each run of `head_width` rotated; see `functions.rope`."""
    inv_freq = frequencies(rope, x.device)
    positions = rows.positions + rope.shift if rope.shift else rows.positions
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _rope_kernel[(triton.cdiv(x.shape[1], _BLOCK), x.shape[0])](
        x, positions, inv_freq, out, x.stride(0), x.shape[1], head_width, first,
        rope.dim // 2, float(rope.scale), INTERLEAVED=rope.interleaved, BLOCK=_BLOCK, **early(x),
    )  # fmt: skip
    return out


def unrotated(x: Tensor, w: Packed) -> tuple[Tensor, Packed]:
    """Returns activations and a packed weight whose product equals that of x and w, but whose format is not rotated: x
    multiplied by the Hadamard matrix, with as many columns as a panel, and `plain(w)`; x and w themselves if w is not
    rotated.

    x: [..., K or more] f32; columns after the first K are not read.
    """
    block, columns = rotation_of(w)
    if not block:
        return x, w
    rows = x.flatten(0, -2)
    out = torch.empty(rows.shape[0], columns, dtype=torch.float32, device=x.device)
    _hadamard_kernel[(rows.shape[0], triton.cdiv(columns, _ROTATED))](
        rows, out, rows.stride(0), w.k, columns, 1 / math.sqrt(block),
        STAGES=block.bit_length() - 1, BLOCK=_ROTATED, num_warps=1, **early(x),
    )  # fmt: skip
    return out.view(*x.shape[:-1], columns), plain(w)


def plain(w: Packed) -> Packed:
    """Returns w with the same bytes in a format without rotation, to be multiplied with rotated rows (see `unrotated`);
    w itself if its format is not rotated.
    """
    block, columns = rotation_of(w)
    return replace(w, format=replace(w.format, rotation=0), k=columns) if block else w


def rotation_of(w: Packed) -> tuple[int, int]:
    """Returns the number of columns of one rotated block of w (0: w is not rotated), and the number of columns of the
    rows that w is then multiplied with: those of a panel, or w's own if it is not rotated.
    """
    block = w.format.of_columns(w.k).rotation
    return block, layout(w.format, w.k).columns if block else w.k


def swiglu(x: Tensor, width: int, glu: Glu = SILU) -> Tensor:
    """Returns silu(gate) * up, or the activation that `glu` says, [T, width]; in x [T, 2I'] runs of 16 gate and 16
    up columns alternate."""
    if glu.ungated:
        return functions.swiglu(x, width, glu)
    return swiglu_of(Parts.of(x), width, glu)


def swiglu_of(parts: Parts, width: int, glu: Glu = SILU) -> Tensor:
    """Returns silu(gate) * up, or the activation that `glu` says, [T, width], of a sum of parts [T, 2I'] in which runs
    of 16 gate and 16 up columns alternate.
    """
    if glu.ungated:
        return functions.swiglu(sum_parts(parts), width, glu)
    rows = parts.shape[0]
    out = torch.empty(rows, width, dtype=torch.float32, device=parts.values.device)
    # Parts are read by as many programs as products have.
    block = _BLOCK if parts.values.shape[1] == 1 else 128
    _swiglu_kernel[(triton.cdiv(width, block), rows)](
        Sum.of(parts), out, width, glu_arguments(glu), RUN=PANEL_ROWS, BLOCK=block, **early(out)
    )
    return out


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    table: Tensor | None = None,
    *,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the top_k experts of each token, ids int32 [T, K], and their gates f32 [T, K] by the rule of
    kt_program_route; see `functions.route`.
    """
    if table is not None:
        return functions.route(logits, routing, bias, factors, table, rows=rows)
    return route_all(logits, routing, bias, factors)


def route_all(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    live: Tensor | None = None,
    x: Tensor | None = None,
    to: Sent | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the top_k experts of each token, ids int32 [T, K] (-1 in rows that are not `live`), and their gates f32
    [T, K]. If `to` is given, x [T, hidden], ids and gates are also written to its tensors x, ids and gates in pinned
    memory; in it, only rows of x may have gaps.
    """
    r, tokens = routing, logits.shape[0]
    ids = torch.empty(tokens, r.top_k, dtype=torch.int32, device=logits.device)
    gate = torch.empty(tokens, r.top_k, dtype=torch.float32, device=logits.device)
    to_x, to_ids, to_gates = to or (None, None, None)
    rows, hidden, blocks = (0, 0), 0, 0
    if x is not None and to_x is not None:
        rows, hidden = (x.stride(0), to_x.stride(0)), x.shape[1]
        blocks = triton.cdiv(hidden, _BLOCK)
    _route_kernel[(tokens, 1 + blocks)](
        logits, bias, factors, None if live is None else live.view(torch.uint8), ids, gate,
        x, to_x, to_ids, to_gates, logits.stride(0), r.experts, float(r.scale), float(r.band), *rows, hidden,
        **choice_arguments(r, bias, factors, live), SENT=blocks > 0, COPIED=_BLOCK,
        num_warps=1 if r.experts <= 256 else 4,  # within one, the dozens of reductions need no barrier
        **early(logits),
    )  # fmt: skip
    return ids, gate
