"""Products with packed weights as differentiable functions, with f32 torch tensors as input and output.

`Products` computes with the packed bytes, forward and backward; the functions here connect it to torch's graph. The
weights have no gradients. Those of the factors of experts are added where the products find them; those of dense
factors are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ktcli.ops.torch.backend import ExpertRunner
from ktcli.ops.torch.packed import Packed, unpack_whole
from ktcli.training.dropout import Dropout
from ktcli.training.lora import DenseFactors
from ktcli.training.stable import stable_product


class Products(Protocol):
    """The interface of the products with the packed weights of a model. `layer` counts the layers with experts from
    0.
    """

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Returns x W^T [T, n] f32 of rows x [T, k] f32 and the dense matrix W [n, k] of this name, without a bias."""

    def transposed(self, name: str, x: Tensor) -> Tensor:
        """Returns x W [T, k] f32 of rows x [T, n] f32 and the dense matrix W [n, k] of this name: the gradient of the
        input of `linear`.
        """

    def experts(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum [T, H] f32 of the chosen experts, ids int32 [T, K], of x [T, H], weighted by gate [T, K];
        with the trained factors of that layer's experts.
        """

    def experts_backward(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients (of x [T, H], of gate [T, K], 0 where the id is negative) from `dout` [T, H], the
        gradient of the sum that `experts` returns; adds those of the factors of the layer's experts to their gradients.
        """


class DenseProduct:
    """A dense matrix with its trained factors."""

    update = None  # of an adapter, which a backend would add: the factors are in the product

    def __init__(
        self,
        name: str,
        n: int,
        products: Products,
        factors: Sequence[tuple[DenseFactors, Any]],
        dropout: Dropout,
    ) -> None:
        self._name, self._n, self._products, self._dropout = name, n, products, dropout
        self._factors = factors  # each with (rows, taken), see `DenseFactors.placed`

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T [T, n] f32 of x [T, k], with the updates."""
        y = _linear(x, self._products, self._name)
        if not self._factors:
            return y
        tall = torch.cat([self._tall(each, *placed) for each, placed in self._factors], 1)
        return y + stable_product(self._low(x), tall)

    def _low(self, x: Tensor) -> Tensor:
        """What all A give of x, scaled [T, ranks]."""
        scaled = [each.a * (each.scale * self._dropout.scale) for each, _ in self._factors]
        if not self._dropout.active:
            return stable_product(x, torch.cat(scaled))
        names = (each.name for each, _ in self._factors)
        read = (self._dropout.thinned(name, x) for name in names)
        return torch.cat([stable_product(own, a) for own, a in zip(read, scaled, strict=True)], 1)

    def _tall(self, factors: DenseFactors, rows: Tensor, taken: Tensor) -> Tensor:
        """B as rows of the stored matrix [n, r], zero where it has none."""
        b = factors.b.index_select(0, taken)
        return b.new_zeros(self._n, factors.rank).index_copy(0, rows, b)


class HeadMatrices:
    """One matrix per head of latent attention, with their trained factors."""

    def __init__(
        self,
        packed: Callable[[], Packed],
        factors: Sequence[tuple[DenseFactors, Tensor]],
        dropout: Dropout,
    ) -> None:
        self._packed, self._dropout = packed, dropout
        self._factors = factors  # each with the rows of B of each head

    def __call__(self, x: Tensor, first: int) -> Tensor:
        """Returns x W^T [T, heads * n] f32 of x [T, k] and the matrices of all heads, with the updates; `first` is the
        number of the first row in its step."""
        y = stable_product(x, unpack_whole(self._packed(), torch.float32).flatten(0, 1))
        for each, taken in self._factors:
            a = each.a * (each.scale * self._dropout.scale)
            low = stable_product(self._dropout.thinned(each.name, x, first), a)
            y = y + stable_product(low, each.b[taken].flatten(0, 1))
        return y


class DifferentiableExperts(ExpertRunner):
    """Computes the chosen experts of layers, with gradients.

    Args:
        skipped: of each layer with experts, whether zeros stand for their sum: in a backward pass, whose gradients do
            not depend on its values. (): of none.
    """

    def __init__(self, products: Products, skipped: Sequence[bool] = ()) -> None:
        self._products, self._skipped = products, skipped

    def start(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False
    ) -> Tensor:
        """Returns the sum [T, H] f32 of the chosen experts, ids int32 [T, K], of x [T, H], weighted by gate [T, K],
        with a graph through x and gate; zeros if the sum of this layer is skipped. `sent` is ignored.
        """
        skips = bool(self._skipped) and self._skipped[layer]
        return _experts(x, gate, ids, self._products, layer, skips)

    def finish(self, pending: Any) -> Tensor:
        """Returns `pending` as it is: the sum [T, H] that `start` has computed."""
        found: Tensor = pending
        return found


class _PackedLinear(torch.autograd.Function):
    """x W^T; its gradient needs nothing of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, products: Products, name: str) -> Tensor:
        ctx.products, ctx.name = products, name
        return products.linear(name, x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return ctx.products.transposed(ctx.name, dout), None, None


class _ExpertSum(torch.autograd.Function):
    """The sum of chosen experts; its gradient computes gate and up again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, ids: Tensor, products: Products, layer: int, skips: bool
    ) -> Tensor:
        ctx.products, ctx.layer = products, layer
        ctx.save_for_backward(x, gate, ids)
        return torch.zeros_like(x) if skips else products.experts(layer, x, ids, gate)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, gate, ids = ctx.saved_tensors
        dx, dgate = ctx.products.experts_backward(ctx.layer, x, ids, gate, dout)
        return dx, dgate, None, None, None, None


# torch declares no types for what applies a function.
_linear = cast("Callable[[Tensor, Products, str], Tensor]", _PackedLinear.apply)
_experts = cast("Callable[[Tensor, Tensor, Tensor, Products, int, bool], Tensor]", _ExpertSum.apply)
