"""The device backend: executes a forward pass in torch, on a GPU or, in tests, on the CPU.

One backend is one step: it is made with what the step reads (embedded rows, positions, pages), runs the
forward once and is dropped; or it is run once under capture, and the graph replayed while the caller writes
the same tensors anew. The residual stream and all rows between operations are f32. Operations that look at positions,
pages or states take neighbouring runs of equal length together, all others every row of the step. Where the experts run
is not decided here: an `ExpertRunner` takes a layer's rows and gives back their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ktcli.ops.backend import Backend, Block
from ktcli.ops.operation import FieldKind, Operation, layout_of
from ktcli.ops.part import LayerPart
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Embed, Linear, Select
from ktcli.ops.tensors import Tensor
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merged import Mlp, Parts, Sent
from ktcli.ops.torch.packed import Matrix, PackedStack
from ktcli.ops.torch.pages import own_parts
from ktcli.ops.torch.recurrent import States
from ktcli.records import dataclass

Value = torch.Tensor
Routed = tuple[torch.Tensor, torch.Tensor]  # ids int32 [T, K], gate f32 [T, K]


class ExpertRunner(Protocol):
    """The interface of what computes the chosen experts of a layer, on whichever device they are. `layer` counts the
    layers with experts from 0.
    """

    def outbox(self, layer: int, n_tokens: int) -> Sent | None:
        """Returns the buffers into which the router of a layer writes its rows and its choice for experts that are
        computed elsewhere: x [n_tokens, hidden], ids and gates [n_tokens, top_k]. None: there are none, and `start`
        copies the rows.
        """
        return None

    def start(
        self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor, *, sent: bool = False
    ) -> Any:
        """Starts computing the experts ids [T, K] of x [T, H], weighted by gate [T, K]; returns a handle for `along`
        and `finish`.

        Args:
            sent: whether x, ids and gate have been written to the outbox.
        """

    def along(self, pending: Any, mlp: Mlp) -> Parts | None:
        """Computes the experts that are on the device together with an MLP of the same rows, in the same kernels;
        returns the MLP's output as a sum of parts [T, N]; None: the MLP was not computed.
        """
        return None

    def elsewhere(self, part: LayerPart) -> Callable[[Value], Value] | None:
        """Returns the function that computes a part of a layer whose weights are not on the device, from rows [T, H] to
        rows [T, H] f32; None: the device has the weights.
        """
        return None

    def finish(self, pending: Any) -> Value | Parts:
        """Returns the weighted sum [T, H] f32 of the chosen experts that `start` began (`pending` is its handle), with
        those that the layer before deferred. With merged kernels it may be `Parts`, a sum that is not yet added up.
        """


class OwnExperts:
    """The chosen experts of a layer that are in a stack on the device, computed when their sum is asked for."""

    def __init__(
        self, kernels: Kernels, stack: PackedStack, x: Value, ids: torch.Tensor, gate: torch.Tensor
    ) -> None:
        self._kernels, self._given = kernels, (x, ids, gate, stack)
        self._sum: Value | Parts | None = None

    def along(self, mlp: Mlp) -> Parts | None:
        """Computes the experts together with an MLP of their rows x, in the same kernels; returns the MLP's output as a
        sum of parts [T, N]; None: the MLP was not computed.
        """
        merged = self._kernels.merged
        if self._sum is not None or merged is None:
            return None
        if (made := merged.experts(*self._given, mlp)) is None:
            return None
        self._sum, along = made
        return along

    def sum(self) -> Value | Parts:
        """Returns the weighted sum [T, H] of the layer's chosen experts that are on the device; as `Parts`, not yet
        added up, if a merged kernel computed it.
        """
        if self._sum is None:
            merged = self._kernels.merged
            made = None if merged is None else merged.experts(*self._given)
            self._sum = self._kernels.experts(*self._given) if made is None else made[0]
        return self._sum


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors on the device, by name; without experts and embedding.

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
        parts: the rows in order, cut where the length of runs changes; each longer run is a part of its own.
        caches: the pages of each layer, flat: 64 * elements per position * pages.
        windowed: the layers whose pages are window pages.
        outputs: the rows that give logits, int64, ascending; None: all.
        states: the states of sequences of each layer, f32 [slots, elements]; (): no layer has any.
        routed: the number of layers with experts before those that the step runs.
    """

    x: torch.Tensor
    parts: Sequence[Rows]
    caches: Sequence[torch.Tensor]
    outputs: torch.Tensor | None = None
    states: Sequence[torch.Tensor] = ()
    windowed: frozenset[int] = frozenset()
    routed: int = 0


class TorchBackend(Backend):
    """Executes the operations of one step's forward pass in torch.

    Attributes:
        routings: the ids and gates that the router chose in each layer with experts so far.
    """

    def __init__(
        self, weights: Weights, step: StepInputs, kernels: Kernels, runner: ExpertRunner
    ) -> None:
        self._weights, self._step = weights, step
        self._kernels, self._runner = kernels, runner
        self.routings: list[Routed] = []
        self._chosen: Sequence[Chosen | None] = ()  # of each part

    def run(self, forward: Callable[[Backend], Value]) -> Value:
        """Returns what `forward`, a model's forward pass, computes on this backend: the logits [outputs, vocab], or the
        hidden rows [outputs, hidden] of an embedding model.
        """
        return forward(self)

    def do(self, operation: Operation) -> Any:
        """Executes one operation in torch; one that reads positions or caches runs once for each of the step's parts.
        Returns its result: a tensor of rows, the (ids, gates) of a routing, a handle of started experts, or None for a
        choice of positions.
        """
        match operation:
            # The caller gathered its rows: the table itself stays in host memory.
            case Embed(table):
                assert self._step.x.shape[1] == table.k, table.name
                return self._step.x.float()
            case Select(x):
                outputs = self._step.outputs
                return x if outputs is None else x.index_select(0, outputs)
            case Experts(x, routed):  # the runner has the weights of experts
                return self._runner.start(self._layer - 1, x, *routed)
        if not operation.reads_step:
            given = dict(self._given(operation))
            made = self._kernels[operation.name](**given)
            return _updated(made, **given) if isinstance(operation, Linear) else made
        of_parts = self._of_parts(operation)
        if FieldKind.CHOICE in operation.gives:
            self._chosen = of_parts
            return None
        made = _joined(of_parts)
        if FieldKind.ROUTING in operation.gives:
            self.routings.append(made)
        return made

    @property
    def _layer(self) -> int:
        """The next layer with experts whose router has not yet chosen."""
        return self._step.routed + len(self.routings)

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Returns views of consecutive column ranges of x [T, N]; the i-th range is widths[i] columns wide."""
        return torch.split(x, list(widths), dim=-1)

    def grouped(self, x: Value, weights: tuple[Tensor, ...]) -> Value:
        """Returns the products of consecutive runs of columns of x, each as wide as its weight has inputs, with one
        weight each, concatenated to [T, sum of the weights' outputs].
        """
        return torch.cat(self._groups(x, weights), -1)

    def _groups(self, x: Value, weights: tuple[Tensor, ...]) -> list[Value]:
        """The product of each group of columns with its own matrix."""
        columns = self.split(x, *(weight.k for weight in weights))
        return [self.linear(part, w) for part, w in zip(columns, weights, strict=True)]

    def block(self, part: LayerPart, x: Value, compute: Block) -> Value:
        """Returns the output of one part of a decoder layer for the rows x: `compute(self, x)`, or what the runner
        computes elsewhere if the part's weights are not on the device.
        """
        elsewhere = self._runner.elsewhere(part)
        return compute(self, x) if elsewhere is None else elsewhere(self._value(x))

    def _value(self, x: Any) -> Any:
        """A value as a tensor."""
        return x

    def collect(self, started: Any) -> Value:
        """Finishes computing the experts that the handle `started` stands for; returns their
        weighted sum [T, hidden].
        """
        made = self._runner.finish(started)
        assert not isinstance(made, Parts)
        return made

    def _of_parts(self, operation: Operation) -> list[Any]:
        """Runs the kernel of an operation that reads the step on each part."""
        layout, kernel = layout_of(type(operation)), self._kernels[operation.name]
        given, first, made = dict(self._given(operation)), 0, []
        for number, rows in enumerate(self._step.parts):
            own, last = dict(given), first + rows.positions.shape[0]
            if rows.chunk == 1 and not layout.state:
                rows = rows.apart()  # drafted: what is there of each is what it gives alone
            if layout.pages and getattr(operation, layout.pages) in self._step.windowed:
                rows = rows.in_windows()
            for name in layout.operands:
                if given[name] is not None:
                    own[name] = given[name][first:last]
            if layout.choice:
                own[layout.choice] = self._chosen[number] if given[layout.choice] else None
            result = kernel(**own, rows=rows, **dict(self._kept(operation, rows)))
            if FieldKind.ROUTING in operation.gives and rows.live is not None:
                ids, gate = result
                result = ids.masked_fill(~rows.live[:, None], -1), gate
            made.append(result)
            first = last
        return made

    def _kept(self, operation: Operation, rows: Rows) -> Iterator[tuple[str, Any]]:
        """Yields what a layer keeps of the sequences of some rows, as the kernel of an operation takes it."""
        layout, step = layout_of(type(operation)), self._step
        if layout.pages:
            pages = step.caches[getattr(operation, layout.pages)]
            yield "cache", own_parts(pages, operation.cached)
        if layout.state:
            assert rows.slots is not None, "the step has no states"
            memory = step.states[getattr(operation, layout.state)]
            yield "state", States(memory, rows.slots, getattr(operation, layout.first))

    def _given(self, operation: Operation) -> Iterator[tuple[str, Any]]:
        """Yields the fields that the kernel of an operation takes, by name."""
        for name, kind in layout_of(type(operation)).given:
            yield name, self._resolved(kind, getattr(operation, name))

    def _resolved(self, kind: FieldKind | None, value: Any) -> Any:
        if kind is FieldKind.MATRIX and value is not None:
            return self._weights.matrices[value.name]
        if kind in (FieldKind.VECTOR, FieldKind.IDS) and value is not None:
            return self._weights.vectors[value.name]
        return value


def _updated(y: Value, x: Value, weight: Matrix, **_: Any) -> Value:
    """The product y of x with a matrix, with what an adapter adds."""
    return y if weight.update is None else weight.update.added(y, x)


def _joined(made: Sequence[Any]) -> Any:
    """Joins the rows that a kernel gave for each part: tensors, or pairs of them."""
    if len(made) == 1:
        return made[0]
    if isinstance(made[0], tuple):
        return tuple(torch.cat(each) for each in zip(*made, strict=True))
    return torch.cat(list(made))
