"""The causal convolution, the gated delta rule, Mamba-2's state space model and lightning attention in plain torch:
operations with a fixed-size state.

All is f32. With one row per sequence (run = 1) nothing waits for the device, so a step can be captured; longer
runs go in blocks of tokens, within which the rule is a triangular system.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from ktcli.ops.table.recurrent import DeltaShape, LightningShape, ScanShape
from ktcli.ops.torch.functions import Rows
from ktcli.records import dataclass

_BLOCK = 64  # tokens of a triangular system
# Of one where each channel decays by itself: a row of it costs as much as all keys.
_CHANNEL_BLOCK = 16
_EPS = 1e-6  # below the root of the sum of squares, as the models were trained


@dataclass(frozen=True, slots=True)
class States:
    """The states of an operation in a layer, of all sequences, and the slots that a step reads and writes.

    Attributes:
        memory: f32 [slots, elements].
        slots: int64 [2, sequences], on the device: the slot that is read (negative: zeros, nothing came
            before) and the one that is written.
        first: element with which the part begins.
    """

    memory: Tensor
    slots: Tensor
    first: int = 0

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """Returns the first elements of the operation's part of each sequence's state, f32 [sequences, *shape]; zeros
        for a sequence that has no state yet.
        """
        part = self.memory[:, self.first : self.first + torch.Size(shape).numel()]
        source = self.slots[0]
        found = part.index_select(0, source.clamp(min=0))
        # A slot that nobody wrote may hold anything, and 0 times NaN is NaN.
        return torch.where((source >= 0)[:, None], found, 0.0).view(-1, *shape)

    def write(self, values: Tensor) -> None:
        """Writes values [sequences, …] to the first elements of the operation's part of each sequence's state."""
        flat, first = values.flatten(1), self.first
        self.memory[:, first : first + flat.shape[1]].index_copy_(0, self.slots[1], flat)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    linear: bool = False,
    *,
    rows: Rows,
    state: States,
) -> Tensor:
    """Returns the causal convolution of each column of x [T, N] over the last W rows of its sequence, [T, N]: silu(bias
    + sum over i of weight[i] * x[t - W + 1 + i]), without silu if `linear`; weight is [W * N]. The state becomes each
    sequence's last W - 1 rows.
    """
    taps, run, columns = weight.view(-1, x.shape[1]), rows.run, x.shape[1]
    before = state.read((len(taps) - 1, columns))
    wide = torch.cat((before, x.reshape(-1, run, columns)), 1)
    state.write(wide[:, run:])
    mixed = sum(wide[:, i : i + run] * tap for i, tap in enumerate(taps))
    assert isinstance(mixed, Tensor)
    mixed = mixed if bias is None else mixed + bias
    return (mixed if linear else silu(mixed)).reshape(x.shape)


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    shape: DeltaShape,
    *,
    rows: Rows,
    state: States,
) -> Tensor:
    """Returns the result of the gated delta rule (linear attention) by kt_program_delta's formula, [T, heads * dv] f32,
    and updates the states.

    Args:
        q, k, v: [T, key_heads * dk] twice, [T, heads * dv].
        decay, beta: [T, decays] and [T, heads].
        log_rate: logarithm of the rates, [heads]; bias: added to decay, [decays].
    """
    s, run = shape, rows.run
    q, k = (_spread(x.reshape(-1, run, s.key_heads, s.dk), s.heads) for x in (q, k))
    v = v.reshape(-1, run, s.heads, s.dv).transpose(1, 2)
    # [S, heads, run, 1], or one for each of dk
    decay = (decay + bias).reshape(-1, run, s.heads, s.decays // s.heads).transpose(1, 2)
    rate = log_rate.exp()[:, None, None]
    log_g = s.lowest * (rate * decay).sigmoid() if s.lowest else -rate * softplus(decay)
    beta = beta.reshape(-1, run, s.heads).transpose(1, 2)
    before = state.read((s.heads, s.dk, s.dv))
    rule = _one if rows.single else _many
    out, after = rule((q * s.dk**-0.5, k, v), log_g, beta.sigmoid(), before)
    state.write(after)
    return out.transpose(1, 2).reshape(-1, s.heads * s.dv)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Makes [S, run, key_heads, dk] unit vectors and repeats them for every head -> [S, heads, run, dk]."""
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    return unit.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def _one(
    qkv: tuple[Tensor, Tensor, Tensor], log_g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies the rule to one token; returns out [S, heads, 1, dv] and state [S, heads, dk, dv]."""
    q, k, v = qkv
    state = state * log_g.exp().mT
    correction = beta[..., None] * (v - k @ state)
    state = state + k.mT @ correction
    return q @ state, state


def _many(
    qkv: tuple[Tensor, Tensor, Tensor], log_g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies the rule to any number of tokens, in blocks; returns as `_one` does.

    With G_ij the decay from token j to token i of a block, S the state before it and c the corrections,
        c_i + sum over j < i of b_i (k_i . G_ij k_j) c_j = b_i (v_i - S^T G_i k_i).
    Sources: arXiv 2412.06464, section 3.3; for a decay of each channel arXiv 2510.26692. All blocks' systems are
    solved at once, for b v and for b G k; then the state walks through the blocks.
    """
    run = log_g.shape[2]
    block = _BLOCK if log_g.shape[3] == 1 else _CHANNEL_BLOCK
    short = -run % block  # padding: tokens that do not change the state
    every = (*qkv, beta[..., None], log_g)
    q, k, v, b, total = (
        torch.unflatten(pad(x, (0, 0, 0, short)), 2, (-1, block)) for x in every
    )  # [S, heads, blocks, B, …]
    total = total.cumsum(-2)
    from_start = total.exp()
    system = (b * _pairs(k, k, total)).tril(-1)
    known = torch.cat((b * v, b * from_start * k), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    corrections, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    mixing, asked = _pairs(q, k, total), from_start * q
    to_end = (total[..., -1:, :] - total).exp() * k
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        c = corrections[:, :, i] - of_state[:, :, i] @ state
        out[:, :, i] = asked[:, :, i] @ state + mixing[:, :, i] @ c
        state = from_start[:, :, i, -1:].mT * state + to_end[:, :, i].mT @ c
    return out.flatten(2, 3)[:, :, :run], state


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    shape: ScanShape,
    *,
    rows: Rows,
    state: States,
) -> Tensor:
    """Returns the result of Mamba-2's state space model by kt_program_scan's formula, [T, heads * head_dim] f32, and
    updates the states.

    Args:
        x, b, c: [T, heads * head_dim], and [T, groups * state_dim] twice.
        dt: [T, heads].
        log_rate, bias, skip: [heads].
    """
    s, run = shape, rows.run
    steps = softplus(dt + bias).clamp(s.dt_min, s.dt_max)
    steps = steps.reshape(-1, run, s.heads, 1).transpose(1, 2)  # [S, heads, run, 1]
    values = x.reshape(-1, run, s.heads, s.head_dim).transpose(1, 2)
    b, c = (each.reshape(-1, run, s.groups, s.state_dim) for each in (b, c))
    b, c = (e.repeat_interleave(s.heads // s.groups, dim=2).transpose(1, 2) for e in (b, c))
    before = state.read((s.heads, s.state_dim, s.head_dim))
    log_g = -log_rate.exp()[:, None, None] * steps
    if rows.single:
        after = before * log_g.exp() + b.mT @ (steps * values)
        out = c @ after
    else:
        out, after = _scan_blocks(b, c, steps * values, log_g, before)
    state.write(after)
    out = out + skip[:, None, None] * values
    return out.transpose(1, 2).reshape(-1, s.heads * s.head_dim)


@cache
def _rates(shape: LightningShape, device: torch.device) -> Tensor:
    """Returns the rate of each head's decay, f32 [heads, 1, 1], made at the first use on a device: before anything is
    captured there."""
    return torch.tensor(shape.rates, dtype=torch.float32, device=device)[:, None, None]


def lightning(
    q: Tensor, k: Tensor, v: Tensor, shape: LightningShape, *, rows: Rows, state: States
) -> Tensor:
    """Returns the result of lightning attention (linear attention with a fixed decay) by kt_program_lightning's
    formula, [T, heads * head_dim] f32, and updates the states.

    Args:
        q, k, v: [T, heads * head_dim].
    """
    s, run = shape, rows.run
    q, k, v = (e.reshape(-1, run, s.heads, s.head_dim).transpose(1, 2) for e in (q, k, v))
    before = state.read((s.heads, s.head_dim, s.head_dim))
    rates = _rates(s, q.device)
    if rows.single:
        after = before * (-rates).exp() + k.mT @ v
        out = q @ after
    else:
        log_g = (-rates).expand(q.shape[0], -1, run, -1)
        out, after = _scan_blocks(k, q, v, log_g, before)
    state.write(after)
    return out.transpose(1, 2).reshape(-1, s.heads * s.head_dim)


def _scan_blocks(
    b: Tensor, c: Tensor, entering: Tensor, log_g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies the model to any number of tokens, in blocks; returns out [S, heads, run, head_dim] and the state.
    Source: arXiv 2405.21060, section 6."""
    run = log_g.shape[2]
    short = -run % _BLOCK  # padding: tokens that do not change the state
    b, c, entering, total = (
        torch.unflatten(pad(each, (0, 0, 0, short)), 2, (-1, _BLOCK))
        for each in (b, c, entering, log_g)
    )  # [S, heads, blocks, B, …]
    total = total.cumsum(-2)
    from_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    out = _pairs(c, b, total) @ entering
    for i in range(entering.shape[2]):
        out[:, :, i] += from_start[:, :, i] * (c[:, :, i] @ state)
        entered = (to_end[:, :, i] * b[:, :, i]).mT @ entering[:, :, i]
        state = from_start[:, :, i, -1:] * state + entered
    return out.flatten(2, 3)[:, :, :run], state


def _pairs(a: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Computes a_i . G_ij k_j of the tokens j up to i of each block, else 0: [S, heads, blocks, B, …] -> [.., B, B].

    total: logarithms of the decay from before the block, one for each token or one for each channel. Their
    differences are taken before the exponential, since its two factors might be out of range.
    """
    if total.shape[-1] > 1:
        rows = []
        for i in range(k.shape[-2]):  # one after the other: [B, B, dk] of all blocks would be large
            decay = (total[..., i : i + 1, :] - total).clamp(max=0).exp()
            rows.append((decay * k * a[..., i : i + 1, :]).sum(-1))
        return torch.stack(rows, -2).tril()
    lower = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool, device=a.device).tril()
    return (a @ k.mT) * (total - total.mT).masked_fill(~lower, -torch.inf).exp()
