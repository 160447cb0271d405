"""Products of decoded weights in plain torch and f32: slow, and the reference for the native ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktcli.ops.torch.functions import swiglu
from ktcli.ops.torch.packed import NO_EXTRAS, Extras, Packed, unpack
from ktcli.records import dataclass
from ktcli.training.lora import ExpertFactors, TrainedFactors, by_rows, factors_of
from ktcli.training.recorded import ModelProducts
from ktcli.training.stable import one_thread
from ktcli.training.weights import Places, packed_of, vector_of, weights_of


@dataclass(frozen=True, slots=True)
class DecodedExperts:
    """The experts of one layer.

    Attributes:
        factors: those of gate_up and of down, where they are trained.
    """

    gate_up: Packed
    down: Packed
    extras: Extras = NO_EXTRAS
    factors: tuple[ExpertFactors | None, ExpertFactors | None] = (None, None)

    @property
    def trained(self) -> tuple[ExpertFactors, ...]:
        """The trained factors, those that exist."""
        return tuple(each for each in self.factors if each is not None)


Leaves = dict[
    str, tuple[Tensor, Tensor]
]  # A and B as they lie in factors, by the name of their target


class DecodedProducts:
    """`Products` of decoded weights; the bits do not depend on the number of threads."""

    def __init__(self, dense: Mapping[str, Packed], experts: Sequence[DecodedExperts]) -> None:
        self._dense, self._experts = dense, experts

    @one_thread()
    def linear(self, name: str, x: Tensor) -> Tensor:
        """Returns x W^T [T, n] f32 of rows x [T, k]."""
        return x @ unpack(self._dense[name], 0, torch.float32).mT

    @one_thread()
    def transposed(self, name: str, x: Tensor) -> Tensor:
        """Returns x W [T, k] f32 of rows x [T, n]."""
        return x @ unpack(self._dense[name], 0, torch.float32)

    @one_thread()
    def experts(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
        """Returns the sum [T, H] f32 of the chosen experts of x [T, H], weighted by gate [T, K]."""
        return self._sum(self._experts[layer], x, ids, gate, {})

    @one_thread()
    def experts_backward(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and gate, by torch's graph of the sum; adds those of the factors."""
        of_layer = self._experts[layer]
        x, gate = (each.detach().requires_grad_() for each in (x, gate))
        leaves: Leaves = {
            each.name: (each.a.detach().requires_grad_(), each.b.detach().requires_grad_())
            for each in of_layer.trained
        }
        with torch.enable_grad():
            out = self._sum(of_layer, x, ids, gate, leaves)
            factors = [leaf for both in leaves.values() for leaf in both]
            if out.grad_fn is None:  # no row has chosen an expert
                return torch.zeros_like(x), torch.zeros_like(gate)
            dx, dgate, *others = torch.autograd.grad(
                out, [x, gate, *factors], dout, materialize_grads=True, allow_unused=True
            )
        for each, da, db in zip(of_layer.trained, others[::2], others[1::2], strict=True):
            each.gradient_a += da
            each.gradient_b += db
        return dx, dgate

    def _sum(
        self, of: DecodedExperts, x: Tensor, ids: Tensor, gate: Tensor, leaves: Leaves
    ) -> Tensor:
        out = x.new_zeros(len(x), of.down.n)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            y = _one(of, expert, x[rows], leaves)
            out = out.index_add(0, rows, y * gate[rows, slots][:, None])
        return out


def _one(of: DecodedExperts, expert: int, x: Tensor, leaves: Leaves) -> Tensor:
    """Returns the output [T, H] of one expert for its rows x [T, H]."""
    into, out_of = of.factors
    wide = x @ unpack(of.gate_up, expert, torch.float32).mT
    wide = wide + _update(into, expert, x, of.gate_up.n, leaves)
    if of.extras.gate_up_bias is not None:
        wide = wide + of.extras.gate_up_bias[expert]
    hidden = swiglu(wide, of.down.k, of.extras.glu)
    y = hidden @ unpack(of.down, expert, torch.float32).mT
    y = y + _update(out_of, expert, hidden, of.down.n, leaves)
    return y if of.extras.down_bias is None else y + of.extras.down_bias[expert]


def _update(
    factors: ExpertFactors | None, expert: int, x: Tensor, n: int, leaves: Leaves
) -> Tensor | float:
    """Returns what the factors add to the product [T, n] of one expert."""
    if factors is None:
        return 0.0
    a, b = leaves.get(factors.name, (factors.a, factors.b))
    low = pad(x, (0, a.shape[2] - x.shape[1])) @ a[expert].mT
    return factors.scale * (low @ by_rows(b[expert : expert + 1])[0, :n].mT)


def decoded_products(
    loaded: Places, found: ModelProducts, factors: Sequence[TrainedFactors]
) -> DecodedProducts:
    """Returns products of the loaded weights in plain torch, f32; no nodes may share them."""
    dense = {each.weight.name: packed_of(weights_of(loaded, each.weight)) for each in found.linear}
    experts = []
    for each in found.experts:
        both = packed_of(weights_of(loaded, each.gate_up)), packed_of(weights_of(loaded, each.down))
        of_both = factors_of(each.gate_up, factors), factors_of(each.down, factors)
        biases = (
            None if bias is None else vector_of(loaded, bias)
            for bias in (each.gate_up_bias, each.down_bias)
        )
        experts.append(DecodedExperts(*both, Extras(each.glu, *biases), of_both))
    return DecodedProducts(dense, experts)
