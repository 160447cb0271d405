"""The forward of a segment of layers: what steps run, captured or not, and the count of the experts they choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktcli.engine.device.runners import Runner
from ktcli.models import Model
from ktcli.ops.torch.backend import StepInputs, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merging import backend_of
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class SegmentForward:
    """The forward of a segment, without a reference to the engine: device memory is freed with its last user.

    Attributes:
        caches: the pages of each layer.
        chosen: the counts of chosen experts, int64 [MoE layers of the segment, E].
        states: the states of each layer.
        windowed: the layers whose pages are window pages.
        layers: the layers of the segment.
        routed: the number of layers with experts before it.
    """

    model: Model
    weights: Weights
    caches: Sequence[Tensor]
    kernels: Kernels
    chosen: Tensor
    states: Sequence[Tensor] = ()
    windowed: frozenset[int] = frozenset()
    layers: range = range(0)
    routed: int = 0

    def __call__(
        self, embedded: Tensor, parts: Sequence[Rows], outputs: Tensor | None, runner: Runner
    ) -> Tensor:
        """The residual behind the segment, or the logits [outputs, vocab], of embedded rows or the residual before it,
        see `StepInputs`; counts the experts they chose."""
        inputs = StepInputs(
            embedded, parts, self.caches, outputs, self.states, self.windowed, self.routed
        )
        first, last = self.layers.start, self.layers.stop
        x = embedded if first else None
        backend = backend_of(self.weights, inputs, self.kernels, runner)
        with torch.inference_mode():  # nothing is noted for a way back: that costs each launch
            logits: Tensor = backend.run(lambda b: self.model.part(b, x, first, last))
            if backend.routings:
                count(self.chosen, [ids for ids, _ in backend.routings])
        return logits


def count(chosen: Tensor, ids: Sequence[Tensor]) -> None:
    """Adds to chosen [layers, experts] the number of times that each layer's ids [T, top_k] name each expert;
    negative ids name none."""
    layers, experts = chosen.shape
    first = torch.arange(0, layers * experts, experts, device=chosen.device)
    numbers = torch.stack(list(ids)).long()
    places = (numbers.clamp(min=0) + first[:, None, None]).flatten()
    chosen.view(-1).index_add_(0, places, (numbers >= 0).long().flatten())
