"""Declares the operations that every backend offers, each with the signature of its row in the table.

A family's forward is written once, over this class. The recorder notes the calls as records, of which a native
program is made; a torch backend executes them. `Value` is whatever a backend passes between operations (a view of a
program's buffer, a torch tensor); the forward only hands it on.

Shapes: T rows of the step (or its outputs after `select`), widths as the tensors give them. An operation that
overwrites an operand may do so or not: use only its result afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, ParamSpec

from ktcli.ops.operation import Operation
from ktcli.ops.part import LayerPart
from ktcli.ops.table.attention import Choose, Gqa, Mla, Mqa
from ktcli.ops.table.experts import Experts, Route
from ktcli.ops.table.recurrent import Conv, Delta, Lightning, Pooling, Scan
from ktcli.ops.table.rowwise import (
    Add,
    Embed,
    GateRows,
    Greatest,
    LayerNorm,
    Linear,
    Norm,
    Rotate,
    ScaleRows,
    Select,
    Swiglu,
    TemperRows,
)
from ktcli.ops.table.streams import Collapse, Expand, Mix, SpreadStreams
from ktcli.ops.tensors import Tensor

Value = Any
P = ParamSpec("P")


class Call(Generic[P]):
    """A descriptor that gives a backend a method with the signature of a row of the table: it makes the row's operation
    from its arguments and returns the result of `Backend.do`.
    """

    def __init__(self, row: Callable[P, Operation]) -> None:
        self.row = row

    def __get__(self, backend: Backend, owner: type[Backend]) -> Callable[P, Value]:
        def call(*args: P.args, **facts: P.kwargs) -> Value:
            return backend.do(self.row(*args, **facts))

        return call


Block = Callable[["Backend", Value], Value]  # what a part of a layer makes of its rows


class Backend(ABC):
    """The base class of backends: one method for each operation of a forward pass. `layer` numbers the cached
    layers from 0."""

    embed = Call(Embed)
    norm = Call(Norm)
    layer_norm = Call(LayerNorm)
    linear = Call(Linear)
    rope = Call(Rotate)
    gqa = Call(Gqa)
    choose = Call(Choose)
    mla = Call(Mla)
    mqa = Call(Mqa)
    conv = Call(Conv)
    pooling = Call(Pooling)
    delta = Call(Delta)
    scan = Call(Scan)
    lightning = Call(Lightning)
    route = Call(Route)
    experts = Call(Experts)
    swiglu = Call(Swiglu)
    gate = Call(GateRows)
    add = Call(Add)
    spread = Call(SpreadStreams)
    mix = Call(Mix)
    collapse = Call(Collapse)
    expand = Call(Expand)
    scale = Call(ScaleRows)
    temper = Call(TemperRows)
    greatest = Call(Greatest)
    select = Call(Select)

    @abstractmethod
    def do(self, operation: Operation) -> Value:
        """Executes or records one operation of a forward pass; returns its result in the backend's form, such as a
        torch tensor, or a view of a recorded program's buffer.
        """

    @abstractmethod
    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Returns views of consecutive column ranges of x [T, N]; the i-th range is widths[i] columns wide."""

    @abstractmethod
    def grouped(self, x: Value, weights: tuple[Tensor, ...]) -> Value:
        """Divides the columns of x into consecutive runs, each as wide as its weight has inputs; returns the product of
        each run with its weight, side by side as columns of one value.
        """

    @abstractmethod
    def collect(self, started: Value) -> Value:
        """Returns the weighted sum [T, hidden] of the outputs of each token's chosen experts; `started` is what the
        operation `experts` returned.

        With deferral the sum has the experts that this layer did not defer and those that the previous layer deferred.
        """

    def block(self, part: LayerPart, x: Value, compute: Block) -> Value:
        """Returns the output of one part of a decoder layer, such as its shared experts, for the rows x. As a rule this
        is `compute(self, x)`; a backend whose device does not have the part's weights may have it computed elsewhere.
        """
        return compute(self, x)

    def begin_layer(self, layer: int | None) -> None:  # noqa: B027 (most backends need not know)
        """Sets the decoder layer that the following operations belong to; None: they belong to no layer."""
