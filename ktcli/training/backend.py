"""The differentiable backend: executes layers for training, with the same layers and the same table of operations.

Products with packed weights are functions of `products`, attention that of whole documents (`attention`), and all else
is torch's. Nothing is written in place that a gradient needs, and there are no pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ktcli.ops.operation import FieldKind, Operation, layout_of
from ktcli.ops.table.attention import Mla
from ktcli.ops.table.experts import Route
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.torch import functions
from ktcli.ops.torch.backend import ExpertRunner, Routed, StepInputs, TorchBackend, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import EXACT, Kernel
from ktcli.records import dataclass
from ktcli.training import attention
from ktcli.training.products import DenseProduct, HeadMatrices


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """The weights that the operations of a model read, by the names of stored tensors.

    Attributes:
        matrices: dense matrices and the router, and those of latent attention's expanded form; None: not read.
        vectors: f32.
        experts: computes the chosen experts.
        experts_again: likewise, for layers that are computed again for their gradients alone.
    """

    matrices: Mapping[str, DenseProduct | HeadMatrices | None]
    vectors: Mapping[str, Tensor]
    experts: ExpertRunner
    experts_again: ExpertRunner


class DifferentiableBackend(TorchBackend):
    """Executes operations on rows of documents so that torch can differentiate through them.

    Args:
        step: the residual, and the documents as parts.
        chosen: the ids int32 [T, K] that routers have chosen before, in order, of which only the gates are computed
            anew; None: they choose.
        again: whether the layers are computed for their gradients alone: what these do not depend on is left out.

    Attributes:
        router_logits: those of each router [T, E], in order.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        step: StepInputs,
        chosen: tuple[Tensor, ...] | None = None,
        *,
        again: bool = False,
    ) -> None:
        experts = weights.experts_again if again else weights.experts
        super().__init__(Weights({}, weights.vectors), step, _KERNELS, experts)
        self._matrices, self._given_ids = weights.matrices, chosen
        self.router_logits: list[Tensor] = []

    def do(self, operation: Operation) -> Any:
        """Executes one operation of a model's forward pass on the rows of the documents, so that torch can
        differentiate it; returns its result, such as a tensor [T, N].
        """
        if isinstance(operation, Route):
            self.router_logits.append(operation.logits)
        if isinstance(operation, Route) and self._given_ids is not None:
            ids = self._given_ids[len(self.routings)]
            self.routings.append(self._weighed(operation, ids))
            return self.routings[-1]
        return super().do(operation)

    def _weighed(self, operation: Route, ids: Tensor) -> Routed:
        """Returns ids that were chosen before, and their gates: the router's rule for a table of experts by token id,
        here by row."""
        factors = self._resolved(FieldKind.VECTOR, operation.factors)
        every = torch.arange(len(ids), device=ids.device)
        rows = Rows(every, ids.new_zeros(0, 0), 1, ids=every)
        return functions.route(
            operation.logits, operation.routing, factors=factors, table=ids, rows=rows
        )

    def _kept(self, operation: Operation, rows: Rows) -> Iterator[tuple[str, Any]]:
        """Yields the number of the first row for latent attention, whose factors drop elements of rows, and the states
        of new sequences; documents have no pages."""
        if isinstance(operation, Mla):
            before = takewhile(lambda part: part is not rows, self._step.parts)
            yield "first", sum(len(each.positions) for each in before)
        if layout_of(type(operation)).state:
            yield "state", NewStates(len(rows.positions) // rows.run, rows.positions.device)

    def _resolved(self, kind: FieldKind | None, value: Any) -> Any:
        if kind is FieldKind.MATRIX and value is not None:
            return self._matrices[value.name]
        return super()._resolved(kind, value)


@dataclass(frozen=True, slots=True)
class NewStates:
    """The empty states of new sequences for an operation, see `ops.torch.recurrent.States`: every document begins
    without one, and none is kept behind its last token."""

    sequences: int
    device: torch.device

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """Returns the initial states of new sequences: zeros, f32 [sequences, *shape]."""
        return torch.zeros(self.sequences, *shape, device=self.device)

    def write(self, values: Tensor) -> None:
        """Does nothing: states [sequences, …] behind the last token of a document are not kept."""


def norm(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    head_width: int | None = None,
    columns: int | None = None,
    own_gains: bool = False,
) -> Tensor:
    """Returns RMSNorm of x [T, N], or of its first `columns` columns with the others copied, as `functions.norm`, in a
    new tensor.
    """
    if columns is None:
        return functions.norm(x, gain, eps, head_width, None, own_gains)
    normed = functions.norm(x[:, :columns], gain, eps, head_width)
    return torch.cat((normed, x[:, columns:]), -1)


def linear(
    x: Tensor, weight: DenseProduct, bias: Tensor | None = None, reads: Reads = Reads.FORMAT
) -> Tensor:
    """Returns x [T, K] W^T + bias, [T, N] f32, with the trained factors of W. `reads` is ignored: how x is rounded is
    known to `weight`.
    """
    y = weight(x)
    return y if bias is None else y + bias


_OWN: dict[str, Kernel] = {
    "norm": norm,
    "linear": linear,
    "gqa": attention.gqa,
    "mla": attention.mla,
}
_KERNELS = replace(EXACT, name="differentiable", operations={**EXACT.operations, **_OWN})
