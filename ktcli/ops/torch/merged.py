"""Kernels that perform several operations at once: their definitions and their arguments.

Among these are sums that have not been computed yet: of the parts of a split product, or of the experts of a token.
Taking one is a launch of its own, unless the operation that reads the sum takes it along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ktcli.native import Glu
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.torch.packed import Matrix
from ktcli.records import dataclass

# What a layer hands to the CPU: x f32 [T, hidden], ids int32 and gates f32 [T, top_k].
Sent = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Parts:
    """A sum of parts for each row, not yet added up.

    Attributes:
        values: [T, P, N] f32; neighbouring columns lie side by side.
        routed: ids int32 [T, P], slots int32 [experts] and gates f32 [T, P]: the parts are those of chosen experts, of
            which those in a slot count, times their gates; None: each part counts as it is.
        beside: [T, N] or [N] f32, one more part; None: there is none.
    """

    values: Tensor
    routed: tuple[Tensor, Tensor, Tensor] | None = None
    beside: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Parts:
        """Returns the rows x [T, N] in the form of a sum that has x as its only part."""
        return cls(x[:, None])

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns that the sum has once it is added up."""
        return self.values.shape[0], self.values.shape[2]

    @property
    def alone(self) -> Tensor | None:
        """The rows [T, N] of a sum that has one part only, without a gate; None: the sum has
        several parts, or a gate.
        """
        if self.values.shape[1] > 1 or self.routed is not None or self.beside is not None:
            return None
        return self.values[:, 0]

    def columns(self, first: int, last: int) -> Parts:
        """Returns columns [first, last) of the sum, as a sum of views that is not added up either."""
        beside = None if self.beside is None else self.beside[..., first:last]
        return replace(self, values=self.values[..., first:last], beside=beside)


@dataclass(frozen=True, slots=True)
class Heads:
    """The inputs of grouped-query attention: queries and keys before they are normed and rotated, and values.

    Attributes:
        q, k, v: sums [T, heads * D], [T, kv heads * D] and [T, kv heads * value_dim].
        q_gain, k_gain: [D], of the norms of each head; None: there are none.
        rope: the rotation of each head's columns from `first` on; None: there is none.
    """

    q: Parts
    k: Parts
    v: Parts
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    rope: Rope | None
    first: int


@dataclass(frozen=True, slots=True)
class Latent:
    """The inputs of latent attention: queries before their last columns are rotated, and the latent before its norm
    and rotation.

    Attributes:
        q: a sum [T, heads * (nope + rope)].
        latent: a sum [T, lora + rope]; its first `lora` columns are normed.
        gain: [lora], of the norm; None: there is none.
        rope: the rotation of the last columns of each head, and of the latent; None: there is none.
    """

    q: Parts
    latent: Parts
    gain: Tensor | None
    eps: float
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP of the rows that experts are given: down(glu(gate_up x)) + bias.

    Attributes:
        bias: [N], of down; None: there is none.
    """

    gate_up: Matrix
    down: Matrix
    glu: Glu
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Merged:
    """The kernels that do several operations at once.

    Attributes:
        product: `linear` -> a sum, or None where the product is not made in parts.
        experts: `Kernels.experts`, and perhaps an MLP -> a sum, and that of the MLP, or None if it was not computed;
            None where experts are not made in parts.
        total: (sum) -> its rows.
        add_norm: (rows or None, sums, gain, eps) -> (rows + (the first sum + the second ...), its norm).
        swiglu: (sum, width, glu) -> the activation.
        gqa: (heads, shape, sinks, rows=, cache=) -> attention's result.
        mla: (latent, uk_in, uv, shape, rows=, cache=) -> latent attention's result.
        route: (logits, routing, bias, factors, live=, x=, to=) -> ids and gates, without ids in rows that are not live;
            where `to` says that somebody waits for them, they and x are written there, too.
        router: (x, weight, logit bias, routing, bias, factors, live=, sent=, to=) -> `route` of the logits x W^T +
            logit bias, in f32, which writes the rows `sent`; None where the product is made by itself.
    """

    product: Callable[..., Parts | None]
    experts: Callable[..., tuple[Parts, Parts | None] | None]
    total: Callable[[Parts], Tensor]
    add_norm: Callable[[Tensor | None, tuple[Parts, ...], Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    gqa: Callable[..., Tensor]
    mla: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    router: Callable[..., tuple[Tensor, Tensor] | None]
