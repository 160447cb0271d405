"""Records the operations of a forward pass as data: operations on virtual buffers, which can be printed, checked,
changed by passes, and turned into a native program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ktcli.native import View
from ktcli.ops.backend import Backend, Call, Value
from ktcli.ops.operation import WEIGHTS, FieldKind, Operation, layout_of
from ktcli.ops.table.rowwise import Linear, Summary
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Number:
    """The index of a result that is not rows: the n-th routing, or the n-th choice, of a recording."""

    kind: FieldKind
    n: int


class Buffer(NamedTuple):
    """A virtual buffer of rows.

    Attributes:
        width: columns of f32.
        outputs: whether it has a row for each wanted output instead of each token.
    """

    width: int
    outputs: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded operation.

    Attributes:
        operation: the call, whose operands are views and numbers, and whose weights are declared tensors.
        outs: the views that it writes, in the order of the row.
        numbers: the routings or choices that it makes.
        layer: number of the decoder layer that it belongs to; None: to none.
    """

    operation: Operation
    outs: tuple[View, ...] = ()
    numbers: tuple[Number, ...] = ()
    layer: int | None = None

    @property
    def operands(self) -> tuple[View | None, ...]:
        """The views of buffers that the operation reads, and may overwrite, in the order of its fields; None for an
        optional operand that is left out.
        """
        names = layout_of(type(self.operation)).operands
        return tuple(getattr(self.operation, name) for name in names)

    @property
    def views(self) -> Iterator[View]:
        """An iterator over the views of buffers that the operation writes, then those that it reads."""
        return (view for view in (*self.outs, *self.operands) if view is not None)

    def renamed(self, to: Callable[[View], View]) -> Record:
        """Returns a copy of the recorded operation with each of its views of buffers replaced by `to(view)`."""
        names = layout_of(type(self.operation)).operands
        views = {name: getattr(self.operation, name) for name in names}
        moved = {name: to(view) for name, view in views.items() if view is not None}
        outs = tuple(map(to, self.outs))
        return Record(replace(self.operation, **moved), outs, self.numbers, self.layer)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded forward pass: its operations in order, their buffers, and its results.

    Attributes:
        records: in the order in which they run.
        buffers: the buffers that views are ranges of.
        results: the views that are read after all records ran.
    """

    records: tuple[Record, ...]
    buffers: tuple[Buffer, ...]
    results: tuple[View, ...]


class Recorder(Backend):
    """A backend that records the operations of a forward pass, and checks that widths, matrices and vectors fit
    each other."""

    summary = Call(Summary)

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._buffers: list[Buffer] = []
        self._numbers = dict.fromkeys(FieldKind, 0)
        self._choice: Number | None = None  # the last one
        self._layer: int | None = None

    def finish(self, *results: View) -> Recording:
        """Returns the recording of all operations so far, with `results` as its outputs."""
        return Recording(tuple(self._records), tuple(self._buffers), results)

    def given(self, width: int) -> View:
        """Adds an input buffer of `width` columns, whose rows are written before each run of the recorded program;
        returns its view.
        """
        return self._buffer(width, False)

    def begin_layer(self, layer: int | None) -> None:
        """Sets the decoder layer of the records that follow; None: they belong to no layer."""
        self._layer = layer

    def do(self, operation: Operation) -> Value:
        """Checks and records an operation; returns its result: the `View` of rows, or the `Number` (index) of a routing
        to experts or a choice of positions. Several results are a tuple, views first. For an operation without results,
        returns its first operand.
        """
        choice = layout_of(type(operation)).choice
        if choice and getattr(operation, choice):
            operation = replace(operation, **{choice: self._choice})
        widths = _checked(operation)
        operands = [getattr(operation, name) for name in layout_of(type(operation)).operands]
        if operation.in_place:
            outs: tuple[View, ...] = (operands[0],)
        else:
            like = self._buffers[operands[0].buffer].outputs if operands else False
            domain = like or operation.selects
            outs = tuple(self._buffer(widths[out], domain) for out in operation.outs)
        numbers = tuple(map(self._number, operation.gives))
        if FieldKind.CHOICE in operation.gives:
            self._choice = numbers[0]
        self._records.append(Record(operation, outs, numbers, self._layer))
        made = *outs, *numbers
        return made if len(made) > 1 else made[0] if made else operands[0]

    def split(self, x: View, *widths: int) -> tuple[Value, ...]:
        """Returns views of consecutive column ranges of x, the i-th widths[i] columns wide; records nothing."""
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        return tuple(
            View(x.buffer, x.column + end - width, width)
            for end, width in zip(ends, widths, strict=True)
        )

    def grouped(self, x: View, weights: tuple[Tensor, ...]) -> Value:
        """Records the product of each weight with its run of columns of x, as wide as the weight has inputs; returns
        the view of all products, side by side.
        """
        out = self._buffer(sum(weight.n for weight in weights), self._buffers[x.buffer].outputs)
        columns = self.split(x, *(weight.k for weight in weights))
        parts = self.split(out, *(weight.n for weight in weights))
        for weight, one, part in zip(weights, columns, parts, strict=True):
            operation = Linear(one, weight)
            _checked(operation)
            self._records.append(Record(operation, (part,), layer=self._layer))
        return out

    def collect(self, started: View) -> Value:
        """Returns `started`, the view of the weighted sum of experts that the operation `experts` writes; records
        nothing.
        """
        return started

    def _buffer(self, width: Any, outputs: bool) -> View:
        self._buffers.append(Buffer(width, outputs))
        return View(len(self._buffers) - 1, 0, width)

    def _number(self, kind: FieldKind) -> Number:
        self._numbers[kind] += 1
        return Number(kind, self._numbers[kind] - 1)


def record(forward: Callable[[Backend], Value]) -> Recording:
    """Returns the recording of a forward pass and of the summary of its logits; the results are the views of the
    logits, each row's best id, and the peak (greatest logit) and sum (of exponentials) of each block of 64 logits.
    """
    recorder = Recorder()
    logits = forward(recorder)
    return recorder.finish(logits, *recorder.summary(logits))


def _checked(operation: Operation) -> dict[str, Any]:
    """Returns the widths of an operation.

    Raises:
        AssertionError: an operand, a matrix or a vector has another width, or a tensor another role.
    """
    layout, widths = layout_of(type(operation)), operation.widths()
    for name in layout.operands:
        view, width = getattr(operation, name), widths.get(name)
        has = view.width if view is not None else 0
        assert width is None or has == width or view is None, (
            f"{operation.name} {name}: {has} columns, not {width}"
        )
    for name, kind in layout.weights.items():
        tensor = getattr(operation, name)
        if tensor is None:
            continue
        assert tensor.role in WEIGHTS[kind], (
            f"{operation.name} {name}: {tensor.name} is a {kind.value}"
        )
        wanted = widths.get(name)
        has = (tensor.count, tensor.n, tensor.k) if isinstance(wanted, tuple) else tensor.elements
        assert wanted is None or has == wanted, (
            f"{operation.name} {name}: {tensor.name} is {has}, not {wanted}"
        )
    return widths
