"""Every operation of a forward pass except attention in plain torch: the reference, correct on any device.

Rows of activations are f32 and may be column ranges of wider rows (the last dimension is contiguous, the row
stride is any). With `exact` every product and the cache are f32; else what a product reads is rounded to bf16 first
and its sum is f32. With one token per sequence (run = 1) no operation waits for the device, so a step
can be captured; long runs may wait, and allocate as they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ktcli.native import BLOCK_COLUMNS, PANEL_ROWS, SILU, Glu
from ktcli.ops.table.experts import GroupScore, Routing, Score
from ktcli.ops.table.rowwise import GateKind, Reads, Rope
from ktcli.ops.tensors import ceil_to
from ktcli.ops.torch.packed import (
    Extras,
    Matrix,
    Packed,
    PackedStack,
    PlainMatrix,
    rows_of,
    unpack,
    unpack_many,
)
from ktcli.records import dataclass

# Up to this many rows, `experts` gathers each row's matrices; above, it gathers the rows of each expert.
GATHERED_ROWS = 16
# Elements of a matrix that are un-packed at once: bounds what a product needs beside its weight.
_UNPACKED_ELEMENTS = 1 << 24

# (logits, temperature) -> best, peaks, sums
Summarize = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions, pages and states of T = sequences * run rows: all of a step, or neighbours in it.

    Attributes:
        positions: int64 [T], on the device.
        pages: int32 [sequences, P], on the device: cache page of each run of 64 positions. Where run > 1, only
            as many as the sequences reach with this step: all of them are read.
        run: the number of rows of each sequence, one behind the other.
        slots: int64 [2, sequences], on the device: which states are read and which written, see
            `recurrent.States`; None: no layer keeps one.
        ids: int64 [T], on the device: the tokens; None: no layer looks at them.
        live: bool [T], on the device: the rows of sequences; the others fill a captured step up and choose no
            experts; None: all are.
        chunk: the tokens of the chunk that each sequence's rows are a piece of, see `native.Run`; 0: they are all.
        windows: the same as `pages` for the layers with a window, where pages that no row sees may be any; None: they
            have no pages of their own.
        start: the first position of one sequence's rows, where the host knows it: nothing then waits for the device.
        absorbed: the (first, end) rows of each sequence that take the absorbed form of latent attention; a single row
            takes it anyway.
    """

    positions: Tensor
    pages: Tensor
    run: int
    slots: Tensor | None = None
    ids: Tensor | None = None
    live: Tensor | None = None
    chunk: int = 0
    windows: Tensor | None = None
    start: int | None = None
    absorbed: tuple[tuple[int, int], ...] = ()

    @property
    def forms(self) -> Iterator[tuple[int, int, bool]]:
        """An iterator over (first, end, absorbed): each stretch [first, end) of a sequence's rows that takes one form
        of latent attention, and whether that is the absorbed form.
        """
        done = 0
        for first, end in (*self.absorbed, (self.run, self.run)):
            if done < first:
                yield done, first, False
            if first < end:
                yield first, end, True
            done = end

    @property
    def single(self) -> bool:
        """Whether each sequence has one row in the step, and that row is no piece of a longer chunk."""
        return self.run == 1 and self.chunk <= 1

    @property
    def sequences(self) -> Iterator[tuple[slice, Tensor]]:
        """An iterator over the sequences: the slice of rows of each, and its page table, int32 [P]."""
        for i, table in enumerate(self.pages):
            yield slice(i * self.run, (i + 1) * self.run), table

    def apart(self) -> Rows:
        """Returns the same rows, each as a sequence of its own with the page table of its sequence; recurrent states
        are left out.
        """
        pages, windows = self.pages.repeat_interleave(self.run, 0), self.windows
        windows = None if windows is None else windows.repeat_interleave(self.run, 0)
        return Rows(self.positions, pages, 1, ids=self.ids, live=self.live, windows=windows)

    def in_windows(self) -> Rows:
        """Returns a copy with `windows`, the page tables for layers with a sliding window, in place of `pages`."""
        assert self.windows is not None, "the step has no window pages"
        return replace(self, pages=self.windows)


def in_blocks(rows: slice, size: int) -> Iterator[slice]:
    """Yields the slice `rows` in pieces: consecutive slices of at most `size` rows."""
    for first in range(rows.start, rows.stop, size):
        yield slice(first, min(first + size, rows.stop))


# -- each row by itself ---------------------------------------------------------------------------------


def norm(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    head_width: int | None = None,
    columns: int | None = None,
    own_gains: bool = False,
) -> Tensor:
    """Returns x [T, N] with RMSNorm of each run of `head_width` columns (None: of whole rows), or of the first
    `columns` columns only, in place. gain, f32: one per column of a run, with `own_gains` one per column of x; None: 1.
    """
    if columns is not None:
        x[:, :columns] = norm(x[:, :columns], gain, eps, head_width)
        return x
    values = x.new_ones(head_width or x.shape[1]) if gain is None else gain
    runs = x.reshape(x.shape[0], -1, head_width or values.shape[0])
    values = values.view(-1, runs.shape[2])
    scale = torch.rsqrt(runs.square().mean(-1, keepdim=True) + eps)
    return (runs * scale * values).reshape(x.shape)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Returns LayerNorm of each row of x [T, N]; gain and bias [N] f32."""
    return torch.nn.functional.layer_norm(x, (x.shape[1],), gain, bias, eps)


def swiglu(x: Tensor, width: int, glu: Glu = SILU) -> Tensor:
    """Returns silu(gate) * up, or the activation that `glu` says, [T, width]; in x [T, 2I'] runs of 16 gate and 16 up
    columns alternate (I': width in whole runs), and without a gate x [T, width] is up.
    """
    if glu.ungated:
        return x.relu().square()
    gate, up = x.reshape(x.shape[0], -1, 2, PANEL_ROWS).unbind(2)
    if glu.limit:
        up = up.clamp(-glu.limit, glu.limit)
    if glu.gate_limit or glu.limit:
        gate = gate.clamp(max=glu.gate_limit or glu.limit)
    inner = gate * torch.sigmoid(glu.alpha * (gate + glu.cubic * gate**3)) * (up + glu.shift)
    return inner.reshape(x.shape[0], -1)[:, :width]


def gate(x: Tensor, by: Tensor, kind: GateKind = GateKind.SIGMOID) -> Tensor:
    """Returns x [T, N] multiplied by the sigmoid, silu or softplus of `by` [T, G], or by `by` itself, as `kind` says;
    each column of `by` multiplies N / G columns of x.
    """
    opened = _OPENED[kind](by)
    runs = torch.unflatten(x, -1, (by.shape[-1], -1))
    return (runs * opened[..., None]).flatten(-2)


_OPENED: dict[GateKind, Callable[[Tensor], Tensor]] = {
    GateKind.SIGMOID: torch.sigmoid,
    GateKind.SILU: torch.nn.functional.silu,
    GateKind.SOFTPLUS: torch.nn.functional.softplus,
    GateKind.LINEAR: lambda by: by,
}


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns a + b, [T, N] each."""
    return a + b


def scale(x: Tensor, by: float, limit: float = 0.0, factor: Tensor | None = None) -> Tensor:
    """Returns p = x * by * factor (None: 1); if `limit` is not 0, limit * tanh(p / limit)."""
    made = x * by if factor is None else x * (by * factor)
    return limit * torch.tanh(made / limit) if limit else made


def temper(x: Tensor, beta: float, every: int, shift: int = 0, *, rows: Rows) -> Tensor:
    """Returns x [T, N], each row times 1 + beta * log(1 + floor((position + shift) / every)) of its position."""
    steps = torch.div(rows.positions + shift, every, rounding_mode="floor").float()
    return x * (1 + beta * torch.log1p(steps))[:, None]


def greatest(x: Tensor) -> Tensor:
    """Returns the maximum of each row of x, [T, N] -> [T, 1]."""
    return x.amax(-1, keepdim=True)


@cache
def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Returns the frequencies of the rotary embedding `rope` in radians per position, f32 [dim / 2], on `device`."""
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)


def rope(x: Tensor, rope: Rope, head_width: int, first: int = 0, *, rows: Rows) -> Tensor:
    """Returns x [T, N] with columns [first, first + dim) of each run of `head_width` columns rotated by the rotary
    embedding `rope` at the rows' positions.
    """
    inv_freq, half, interleaved = frequencies(rope, x.device), rope.dim // 2, rope.interleaved
    positions = rows.positions + rope.shift if rope.shift else rows.positions
    # In f32, as the models were trained: the angle is rounded before its sine is taken.
    angles = (positions.float()[:, None] * inv_freq)[:, None]  # [T, 1, dim/2]
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    out = x.clone(memory_format=torch.contiguous_format).view(x.shape[0], -1, head_width)
    part = out[..., first : first + 2 * half]
    split = (half, 2) if interleaved else (2, half)
    a, b = torch.unflatten(part, -1, split).unbind(-1 if interleaved else -2)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2)
    out[..., first : first + 2 * half] = rotated.flatten(-2)
    return out.view(x.shape)


# -- products ------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    reads: Reads = Reads.FORMAT,
    *,
    exact: bool = False,
) -> Tensor:
    """Returns x [T, K] W^T + bias, [T, N] f32. Both factors are rounded to bf16, unless `exact` is set or `reads` is
    F32.
    """
    exact = exact or reads is Reads.F32
    dtype = read_type(exact)
    if isinstance(weight, PlainMatrix):
        out = product(x, weight.data.to(dtype), exact=exact)
    else:
        rows = blocks(weight, _UNPACKED_ELEMENTS)
        out = torch.cat([product(x, unpack(b, 0, dtype), exact=exact) for b in rows], -1)
    return out if bias is None else out + bias


def blocks(w: Packed, elements: int) -> list[Packed]:
    """Returns views of consecutive rows of the packed matrix w, each of about `elements` elements, so that a caller can
    unpack one after the other.
    """
    step = ceil_to(max(1, elements // w.k), PANEL_ROWS)
    return [rows_of(w, first, min(first + step, w.n)) for first in range(0, w.n, step)]


def product(x: Tensor, w: Tensor, *, exact: bool) -> Tensor:
    """Returns x [(B,) T, K] times the transpose of w [(B,) N, K] as f32 [(B,) T, N]; w has the dtype of `read_type`,
    and x is rounded to bf16 unless `exact`.
    """
    if exact:
        return x @ w.mT
    rounded = x.bfloat16()
    if not x.is_cuda:
        return rounded.float() @ w.float().mT
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    return multiply(rounded, w.mT, out_dtype=torch.float32)


def read_type(exact: bool) -> torch.dtype:
    """Returns the dtype to which both factors of products are rounded: f32 if `exact`, else bf16."""
    return torch.float32 if exact else torch.bfloat16


def rounded(x: Tensor, exact: bool) -> Tensor:
    """Returns x as f32 with its values rounded to bf16; x itself if `exact`."""
    return x if exact else x.bfloat16().float()


# -- routing and experts -------------------------------------------------------------------------------


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    table: Tensor | None = None,
    *,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the top_k experts of each token and their gates, chosen by the rule of kt_program_route.

    Args:
        logits: [T, E] f32; bias: [E] f32, added to the scores for choosing only; factors: [E] f32, of the gates.
        table: integers [vocab * K], the experts of each token id (`rows.ids`); None: experts are chosen by score.
    Returns:
        ids int32 [T, K], best first and of equals the lower id, or in the table's order; gates f32 [T, K].
    """
    r, score = routing, scores(logits, routing.score)
    if table is not None:
        assert rows is not None and rows.ids is not None, "the step has no ids"
        given = table.view(-1, r.top_k).index_select(0, rows.ids)
        return _weighted(score, given.long(), r, factors)
    rank = score if bias is None else score + bias
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    if r.n_group > 1:
        # Stable, so that the open experts come first and keep their order.
        is_open = _open_experts(rank, r).gather(1, order)
        order = order.gather(1, is_open.int().sort(dim=-1, descending=True, stable=True).indices)
    chosen = order[:, : r.top_k]
    if r.score is Score.SPARSEMIXER:
        score = _near_shares(logits, chosen, r.band)
    return _weighted(score, chosen, r, factors)


def scores(logits: Tensor, kind: Score) -> Tensor:
    """Returns the router's score of each expert, [T, E], from its logits [T, E]: their softmax, sigmoid, square root of
    softplus, or the logits themselves, as `kind` says.
    """
    if kind is Score.SOFTMAX:
        return softmax(logits)
    if kind is Score.SIGMOID:
        return logits.sigmoid()
    if kind is Score.SPARSEMIXER:
        return logits
    return torch.nn.functional.softplus(logits).sqrt()


class _Softmax(torch.autograd.Function):
    """The softmax of rows. The last bits of torch's own gradient depend on how many of the rows a thread has (AMD EPYC
    without AVX-512, torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.softmax(-1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        grad: Tensor = out * (dout - (dout * out).sum(-1, keepdim=True))
        return grad


# torch declares no types for what applies a function.
_softmax = cast("Callable[[Tensor], Tensor]", _Softmax.apply)


def softmax(x: Tensor) -> Tensor:
    """Returns the softmax of x [..., E] over its last dimension, whose gradient has the same bits with any number of
    threads."""
    return _softmax(x) if x.requires_grad else x.softmax(-1)


def _near_shares(logits: Tensor, chosen: Tensor, band: float) -> Tensor:
    """Returns the softmax of each chosen expert among those near it that were not chosen before, zero elsewhere, [T,
    E]; see kt_program_route."""
    shares, others = torch.zeros_like(logits), logits
    for k in range(chosen.shape[1]):
        one = chosen[:, k : k + 1]
        top = logits.gather(1, one)
        is_far = (top - logits) / logits.abs().maximum(top) > band
        near = softmax(others.masked_fill(is_far, float("-inf")))
        shares = shares.scatter(1, one, near.gather(1, one))
        others = others.scatter(1, one, float("-inf"))
    return shares


def _weighted(
    score: Tensor, chosen: Tensor, r: Routing, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    gate = score.gather(1, chosen)
    if r.normalize:
        gate = gate / (gate.sum(-1, keepdim=True) + 1e-20)  # DeepSeek's guard against a zero sum
    gate = gate * r.scale
    return chosen.int(), gate if factors is None else gate * factors[chosen]


def _open_experts(rank: Tensor, r: Routing) -> Tensor:
    """Returns bool [T, E]: the experts of the topk_group best groups."""
    grouped = torch.unflatten(rank, -1, (r.n_group, -1))
    best = min(2, grouped.shape[-1]) if r.group_score is GroupScore.TOP2 else 1
    value = grouped.topk(best, dim=-1).values.sum(-1)
    groups = value.sort(dim=-1, descending=True, stable=True).indices[:, : r.topk_group]
    is_open = torch.zeros_like(value, dtype=torch.bool).scatter(1, groups, True)
    return is_open.unsqueeze(-1).expand_as(grouped).flatten(-2)


def experts(
    x: Tensor, ids: Tensor, gate: Tensor, stack: PackedStack, *, exact: bool = False
) -> Tensor:
    """Returns the sum of gate * down(swiglu(gate_up x)) over the chosen experts that are in a stack, in order of ids.

    Args:
        x: [T, H]; ids: int32 [T, K], negative: skipped; gate: [T, K].
    Returns:
        [T, H] f32. Up to GATHERED_ROWS rows it never waits for the device.
    """
    if stack.gate_up.count == 0:
        return x.new_zeros(x.shape[0], stack.down.n)
    ids, order = ids.sort(dim=-1, stable=True)
    gate = gate.gather(1, order)
    slot = torch.where(ids >= 0, stack.slots[ids.clamp(min=0)], -1)  # [T, K]
    way = _experts_gathered if x.shape[0] <= GATHERED_ROWS else _experts_grouped
    return way(x, (ids, slot, gate), stack, exact)


def _expert(
    x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, extras: Extras, exact: bool
) -> Tensor:
    """Computes the experts ids [B] of x [B, H], with the matrices gate_up [B or 1, 2I' or I, H] and down [.., H, I]."""
    wide = _rows_times(x, gate_up, exact)
    if extras.gate_up_bias is not None:
        wide = wide + extras.gate_up_bias.index_select(0, ids)
    out = _rows_times(swiglu(wide, down.shape[-1], extras.glu), down, exact)
    return out if extras.down_bias is None else out + extras.down_bias.index_select(0, ids)


def _rows_times(x: Tensor, w: Tensor, exact: bool) -> Tensor:
    """Multiplies each row of x [B, K] by the transpose of its own matrix of w [B, N, K], or of the only one if B is
    1."""
    if w.shape[0] == 1:
        return product(x, w[0], exact=exact)
    return product(x[:, None], w, exact=exact)[:, 0]


# ids, slots and gates of a routing, each [T, K]
Chosen = tuple[Tensor, Tensor, Tensor]


def _experts_gathered(x: Tensor, chosen: Chosen, stack: PackedStack, exact: bool) -> Tensor:
    """Computes slot by slot, with the matrices of all rows gathered."""
    stacks, out = (stack.gate_up, stack.down), x.new_zeros(x.shape[0], stack.down.n)
    for ids, slot, gate in zip(*(each.unbind(1) for each in chosen), strict=True):
        gate_up, down = (unpack_many(s, slot.clamp(min=0), read_type(exact)) for s in stacks)
        y = _expert(x, ids.clamp(min=0), gate_up, down, stack.extras, exact)
        out = out + torch.where((slot >= 0)[:, None], gate[:, None] * y, 0.0)
    return out


def _experts_grouped(x: Tensor, chosen: Chosen, stack: PackedStack, exact: bool) -> Tensor:
    """Computes expert by expert, with the rows that chose it; waits once, for how many these are."""
    (ids, slot, gate), stacks, count = chosen, (stack.gate_up, stack.down), stack.gate_up.count
    order = slot.flatten().sort(stable=True).indices
    numbers = (slot + 1).flatten()
    counts = torch.zeros(count + 1, dtype=torch.int64, device=x.device)  # bincount would wait, too
    sizes = counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int64)).tolist()
    flat_gate = gate.flatten()
    out = x.new_zeros(x.shape[0], stack.down.n)
    first = sizes[0]  # what is not here comes first
    for expert, size in enumerate(sizes[1:]):
        if not size:
            continue
        places = order[first : first + size]
        tokens = places // slot.shape[1]
        gate_up, down = (unpack(each, expert, read_type(exact))[None] for each in stacks)
        numbers = ids.flatten().index_select(0, places)
        y = _expert(x.index_select(0, tokens), numbers, gate_up, down, stack.extras, exact)
        out.index_add_(0, tokens, y * flat_gate.index_select(0, places)[:, None])
        first += size
    return out


# -- results ------------------------------------------------------------------------------------------


def summarize(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summary of logits [B, vocab] that the sampler reads; `temperature` [B] is that of each row.

    Returns:
        best int64 [B], the index of the highest logit; peaks [B, blocks], the highest of each block of 64 logits; sums
        [B, blocks], of exp((logit - peak) / temperature) over each block, 0 at temperature 0.
    """
    vocab = logits.shape[1]
    short = -vocab % BLOCK_COLUMNS
    padded = torch.nn.functional.pad(logits, (0, short), value=-torch.inf)
    blocks = padded.view(logits.shape[0], -1, BLOCK_COLUMNS)
    peaks = blocks.amax(2)
    base = torch.where(peaks.isfinite(), peaks, 0.0)
    divisor = temperature.clamp_min(1e-30)[:, None, None]
    weights = ((blocks - base[:, :, None]) / divisor).exp()
    sums = torch.where(temperature[:, None] > 0, weights.sum(2), 0.0)
    return logits.argmax(1), torch.where(peaks.isnan(), torch.inf, peaks), sums
