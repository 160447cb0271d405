"""Layers with a state of fixed size in plain torch: the causal convolution and the gated delta rule.

All in f32. With one row per sequence (run = 1) nothing waits for the device, so a step can be captured; longer
runs go in blocks of tokens, within which the rule is a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from ktcli.layers.backend import DeltaShape

_BLOCK = 64  # tokens of a triangular system
_EPS = 1e-6  # below the root of the sum of squares, as the models were trained


@dataclass(frozen=True, slots=True)
class States:
    """What a layer keeps of sequences, and which of it a step reads and writes.

    Attributes:
        memory: f32 [slots, elements].
        slots: int64 [2, sequences], on the device: the slot that is read (negative: zeros, nothing came
            before) and the one that is written.
    """

    memory: Tensor
    slots: Tensor

    def read(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """Elements from `first` on of each sequence's state, [sequences, *shape]."""
        part = self.memory[:, first : first + torch.Size(shape).numel()]
        source = self.slots[0]
        found = part.index_select(0, source.clamp(min=0))
        # A slot that nobody wrote may hold anything, and 0 times NaN is NaN.
        return torch.where((source >= 0)[:, None], found, 0.0).view(-1, *shape)

    def write(self, first: int, values: Tensor) -> None:
        """values [sequences, …] as elements from `first` on."""
        flat = values.flatten(1)
        self.memory[:, first : first + flat.shape[1]].index_copy_(0, self.slots[1], flat)


def conv(x: Tensor, weight: Tensor, states: States, run: int) -> Tensor:
    """silu(sum over i of weight[i] * row t - W + 1 + i) of x [T, N], weight [W, N] -> [T, N]."""
    width, columns = weight.shape
    before = states.read(0, (width - 1, columns))
    rows = torch.cat((before, x.reshape(-1, run, columns)), 1)
    states.write(0, rows[:, run:])
    mixed = sum(rows[:, i : i + run] * weight[i] for i in range(width))
    assert isinstance(mixed, Tensor)
    return silu(mixed).reshape(x.shape)


def delta(
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    learned: tuple[Tensor, Tensor],
    shape: DeltaShape,
    states: States,
    *,
    first: int,
    run: int,
) -> Tensor:
    """Gated delta rule by kt_program_delta's formula -> [T, heads * dv] f32.

    Args:
        qkv: [T, key_heads * dk] twice, [T, heads * dv]; gates: decay and beta, [T, heads].
        learned: log of the rates and what is added to decay, [heads].
        first: element of the state with which its part begins.
    """
    s = shape
    q, k = (_spread(x.reshape(-1, run, s.key_heads, s.dk), s.heads) for x in qkv[:2])
    v = qkv[2].reshape(-1, run, s.heads, s.dv).transpose(1, 2)
    decay, beta = (x.reshape(-1, run, s.heads).transpose(1, 2) for x in gates)
    rate, bias = (x[:, None] for x in learned)
    log_g = -rate.exp() * softplus(decay + bias)  # [S, heads, run]
    state = states.read(first, (s.heads, s.dk, s.dv))
    rule = _one if run == 1 else _many
    out, state = rule((q * s.dk**-0.5, k, v), log_g, beta.sigmoid(), state)
    states.write(first, state)
    return out.transpose(1, 2).reshape(-1, s.heads * s.dv)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Unit vectors of [S, run, key_heads, dk] for every head, [S, heads, run, dk]."""
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    return unit.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def _one(
    qkv: tuple[Tensor, Tensor, Tensor], log_g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: (out [S, heads, 1, dv], state [S, heads, dk, dv])."""
    q, k, v = qkv
    state = state * log_g.exp()[..., None]
    correction = beta[..., None] * (v - k @ state)
    state = state + k.mT @ correction
    return q @ state, state


def _many(
    qkv: tuple[Tensor, Tensor, Tensor], log_g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Any number of tokens, in blocks.

    With G_ij the decay from token j to token i of a block, S the state before it and c the corrections,
        c_i + sum over j < i of b_i (k_i . k_j) G_ij c_j = b_i (v_i - G_i S^T k_i).
    Source: arXiv 2412.06464, section 3.3. All blocks' systems are solved at once, for b v and for b G k; then
    the state walks through the blocks.
    """
    run = log_g.shape[-1]
    short = -run % _BLOCK  # tokens that teach and forget nothing
    q, k, v = (_blocks(pad(x, (0, 0, 0, short))) for x in qkv)
    b, total = (_blocks(pad(x, (0, short))) for x in (beta, log_g))
    total = total.cumsum(-1)  # [S, heads, blocks, B]
    lower = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    from_start, b = total.exp()[..., None], b[..., None]
    system = (b * (k @ k.mT) * between).tril(-1)
    known = torch.cat((b * v, b * from_start * k), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    corrections, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    mixing = (q @ k.mT) * between
    to_end = (total[..., -1:] - total).exp()[..., None] * k
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        c = corrections[:, :, i] - of_state[:, :, i] @ state
        out[:, :, i] = from_start[:, :, i] * (q[:, :, i] @ state) + mixing[:, :, i] @ c
        state = from_start[:, :, i, -1:] * state + to_end[:, :, i].mT @ c
    return out.flatten(2, 3)[:, :, :run], state


def _blocks(x: Tensor) -> Tensor:
    """[S, heads, T, …] -> [S, heads, T / B, B, …]"""
    return torch.unflatten(x, 2, (-1, _BLOCK))
