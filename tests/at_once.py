"""Several operations at once, in plain torch: the same functions, called when something reads what they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from added_parts import added

from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.torch import functions
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT
from ktcli.ops.torch.merged import Heads, Latent, Merged, Mlp, Parts, Sent
from ktcli.ops.torch.packed import Packed, PlainMatrix
from ktcli.ops.torch.pages import KvPages


def _in_parts(kernel: Callable[..., torch.Tensor]) -> Callable[..., Parts]:
    """The kernel with its result as a sum of several parts, which has the same bits."""

    def called(*args: Any, **named: Any) -> Parts:
        made = kernel(*args, **named)
        return Parts(torch.stack((made, torch.zeros_like(made)), 1))

    return called


def _add_norm(
    a: torch.Tensor | None, sums: tuple[Parts, ...], gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    first, *others = (added(each) for each in sums)
    made = first + others[0] if others else first
    made = made if a is None else a + made
    return made, functions.norm(made, gain, eps)


def _gqa(
    heads: Heads, shape: GqaShape, sinks: torch.Tensor | None, *, rows: Rows, cache: KvPages
) -> torch.Tensor:
    def ready(x: Parts, gain: torch.Tensor | None) -> torch.Tensor:
        normed = added(x)
        if gain is not None:
            normed = functions.norm(normed, gain, heads.eps, shape.head_dim)
        if heads.rope is None:
            return normed
        return functions.rope(normed, heads.rope, shape.head_dim, heads.first, rows=rows)

    q, k = ready(heads.q, heads.q_gain), ready(heads.k, heads.k_gain)
    return EXACT["gqa"](q, k, added(heads.v), shape, sinks, rows=rows, cache=cache)


def _mla(
    of: Latent, uk_in: Packed, uv: Packed, s: MlaShape, *, rows: Rows, cache: tuple[torch.Tensor]
) -> torch.Tensor:
    q, latent = added(of.q), functions.norm(added(of.latent), of.gain, of.eps, columns=s.lora)
    if of.rope is not None:
        q = functions.rope(q, of.rope, s.nope + s.rope, s.nope, rows=rows)
        latent = functions.rope(latent, of.rope, s.lora + s.rope, s.lora, rows=rows)
    return EXACT["mla"](q, latent, uk_in, uk_in, uv, s, rows=rows, cache=cache)


def _route(
    logits: torch.Tensor, *given: Any, live: torch.Tensor | None, x: torch.Tensor, to: Sent | None
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, gates = EXACT["route"](logits, *given)
    if live is not None:
        ids = ids.masked_fill(~live[:, None], -1)
    if to is not None:
        to[0][:, : x.shape[1]] = x
        for there, here in zip(to[1:], (ids, gates), strict=True):
            there.copy_(here)
    return ids, gates


@dataclass
class RoutersAtOnce:
    """Routers of up to three rows with their choice.

    Attributes:
        taken: the number so far.
    """

    taken: int = 0

    def __call__(
        self,
        x: torch.Tensor,
        weight: PlainMatrix,
        logit_bias: torch.Tensor | None,
        *given: Any,
        live: torch.Tensor | None,
        sent: torch.Tensor,
        to: Sent | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if x.shape[0] > 3:
            return None
        self.taken += 1
        logits = EXACT["linear"](x, weight, logit_bias)
        return _route(logits, *given, live=live, x=sent, to=to)


@dataclass
class ExpertsAtOnce:
    """Experts in parts, with an MLP beside them in two of three steps.

    Attributes:
        offered, taken: the number of MLPs so far.
    """

    offered: int = 0
    taken: int = 0

    def __call__(self, *given: Any) -> tuple[Parts, Parts | None]:
        *of, mlp = given if isinstance(given[-1], Mlp) else (*given, None)
        made = _in_parts(EXACT.experts)(*of)
        self.offered += mlp is not None
        if mlp is None or self.offered % 3 == 0:
            return made, None
        self.taken += 1
        wide = EXACT["linear"](of[0], mlp.gate_up)
        inner = EXACT["swiglu"](wide, mlp.down.k, mlp.glu)
        return made, _in_parts(EXACT["linear"])(inner, mlp.down, mlp.bias)


MERGED = Merged(
    product=_in_parts(EXACT["linear"]),
    experts=ExpertsAtOnce(),
    total=added,
    add_norm=_add_norm,
    swiglu=lambda x, *args: EXACT["swiglu"](added(x), *args),
    gqa=_gqa,
    mla=_mla,
    route=_route,
    router=RoutersAtOnce(),
)
