"""The device backend executes a forward in torch, on a GPU or, in tests, on the CPU.

One backend is one step: it is made with what the step reads (embedded rows, positions, pages), runs the
forward once and is dropped; or it is run once under capture, and the graph replayed while the caller writes
the same tensors anew. The residual stream and all rows between operations are f32. Where the experts run is
not decided here: an `ExpertRunner` takes a layer's rows and gives back their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ktcli.ops.backend import Backend
from ktcli.ops.layout import layout_of
from ktcli.ops.operation import FieldKind, Operation
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Embed, Select
from ktcli.ops.tensors import Tensor
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.packed import Matrix, PackedStack
from ktcli.ops.torch.pages import own_parts
from ktcli.ops.torch.recurrent import States

Value = torch.Tensor
Routed = tuple[torch.Tensor, torch.Tensor]  # ids int32 [T, K], gate f32 [T, K]


class ExpertRunner(Protocol):
    """Runs the chosen experts of a layer, wherever they lie. `layer` counts the layers with experts from 0."""

    def start(self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor) -> Any:
        """Begins to compute the experts ids [T, K] of x [T, H], weighted by gate [T, K], and returns what `finish`
        takes."""

    def finish(self, pending: Any) -> Value:
        """Returns the weighted sum [T, H] f32, with what the runner deferred in the layer before, if it defers."""


class ResidentRunner:
    """Runs experts that all lie on the device.

    Args:
        stacks: the experts of each layer with experts. One that a layer's slots leave out counts as zero.
    """

    def __init__(self, kernels: Kernels, stacks: Sequence[PackedStack]) -> None:
        self._kernels, self._stacks = kernels, stacks

    def start(self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor) -> Value:
        stack = self._stacks[layer]
        return self._kernels.experts(
            x, ids, gate, stack.slots, stack.gate_up, stack.down, stack.extras
        )

    def finish(self, pending: Value) -> Value:
        return pending


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors on the device, by name; experts and embedding are not among them.

    Attributes:
        matrices: dense matrices and the router, and latent attention's, packed, with one matrix per head.
        vectors: f32.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, all on the device.

    Attributes:
        x: [T, H], the embedded rows.
        caches: the pages of each layer, flat: 64 * elements per position * pages.
        first_output: rows from here on give logits.
        states: the states of sequences of each layer, f32 [slots, elements]; (): no layer has any.
    """

    x: torch.Tensor
    rows: Rows
    caches: Sequence[torch.Tensor]
    first_output: int = 0
    states: Sequence[torch.Tensor] = ()


class TorchBackend(Backend):
    """Executes one step.

    Attributes:
        routings: the ids and gates that the router chose in each layer with experts so far.
    """

    def __init__(
        self, weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
    ) -> None:
        self._weights, self._step = weights, step
        self._kernels, self._runner = kernels, runner
        self.routings: list[Routed] = []
        self._chosen: Chosen | None = None

    def do(self, operation: Operation) -> Any:
        match operation:
            case Embed(
                table
            ):  # the caller gathered its rows: the table itself stays in host memory
                assert self._step.x.shape[1] == table.k, table.name
                return self._step.x.float()
            case Select(x):
                return x[self._step.first_output :]
            case Experts(x, routed):  # the runner has the weights of experts
                return self._runner.start(len(self.routings) - 1, x, *routed)
        made = self._kernels[operation.name](**dict(self._given(operation)))
        if FieldKind.ROUTING in operation.gives:
            self.routings.append(made)
        if FieldKind.CHOICE in operation.gives:
            self._chosen = made
        return made

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        return torch.split(x, list(widths), dim=-1)

    def grouped(self, x: Value, weights: tuple[Tensor, ...]) -> Value:
        columns = self.split(x, *(weight.k for weight in weights))
        done = (self.linear(part, w) for part, w in zip(columns, weights, strict=True))
        return torch.cat(list(done), -1)

    def collect(self, started: Any) -> Value:
        return self._runner.finish(started)

    def _given(self, operation: Operation) -> Iterator[tuple[str, Any]]:
        """Yields what the kernel of an operation takes, by name."""
        layout, step = layout_of(type(operation)), self._step
        for name, kind in layout.given:
            yield name, self._resolved(kind, getattr(operation, name))
        if operation.reads_step:
            yield "rows", step.rows
        if layout.pages:
            yield (
                "cache",
                own_parts(step.caches[getattr(operation, layout.pages)], operation.cached),
            )
        if layout.state:
            assert step.rows.slots is not None, "the step says nothing of states"
            memory = step.states[getattr(operation, layout.state)]
            yield "state", States(memory, step.rows.slots, getattr(operation, layout.first))

    def _resolved(self, kind: FieldKind | None, value: Any) -> Any:
        if kind is FieldKind.CHOICE:
            return self._chosen if value else None
        if kind is FieldKind.MATRIX and value is not None:
            return self._weights.matrices[value.name]
        if kind in (FieldKind.VECTOR, FieldKind.IDS) and value is not None:
            return self._weights.vectors[value.name]
        return value
