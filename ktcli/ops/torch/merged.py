"""Kernels that do several operations at once: what they are, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ktcli.ops.table.rowwise import Rope


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries and keys before they are normed and rotated.

    Attributes:
        q, k: [T, heads * D] and [T, kv heads * D] f32.
        q_gain, k_gain: [D], of the norms of each head; None: there are none.
        rope: the rotation of each head's columns from `first` on; None: there is none.
    """

    q: Tensor
    k: Tensor
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    rope: Rope | None
    first: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The kernels that do several operations at once.

    Attributes:
        add_norm: (a, b, gain, eps) -> (a + b, its norm).
        gqa: (heads, v, shape, sinks, rows=, cache=) -> attention's result.
    """

    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gqa: Callable[..., Tensor]
