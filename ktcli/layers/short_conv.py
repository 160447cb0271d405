"""A gated short convolution in attention's place: its state is the last rows that it reads (LFM2)."""

from __future__ import annotations

from functools import cached_property

from ktcli.layers.gated_delta import STATE_LINE, projection
from ktcli.ops.backend import Backend, Value
from ktcli.ops.scratch import Projections
from ktcli.ops.state import LayerState
from ktcli.ops.table.rowwise import GateKind
from ktcli.ops.tensors import Role, Stored, Tensor, ceil_to, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class ShortConv(Projections):
    """out(c * conv(b * x)), where b, c and x are projections of the input, and each column is convolved by itself.

    Source: the LFM2 report, arXiv 2511.23404; transformers 5.23 (lfm2_moe).

    Attributes:
        width: the number of rows that the convolution reads.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.0.conv".
    """

    hidden: int
    width: int
    layer: int = 0
    source: str = ""

    @cached_property
    def entering(self) -> Tensor:
        """The projection [3 * hidden, hidden] of the input to b, c and x."""
        return self._matrix("in", "in_proj", 3 * self.hidden)

    @cached_property
    def o(self) -> Tensor:
        """The output projection [hidden, hidden]."""
        return self._matrix("o", "out_proj", self.hidden)

    def _matrix(self, name: str, of: str, rows: int) -> Tensor:
        stored = Stored(f"{self.source}.{of}.weight", (rows, self.hidden))
        return projection(f"layers.{self.layer}.conv.{name}", (stored,), Role.DENSE, self.layer)

    @cached_property
    def taps(self) -> Tensor:
        """The weight [width * hidden] of the convolution, the oldest row's first."""
        shape = (self.hidden, 1, self.width)
        stored = Stored(f"{self.source}.conv.weight", shape, transposed=True)
        return vector(f"layers.{self.layer}.conv.taps", stored, layer=self.layer)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer's convolution."""
        return self.entering, self.o, self.taps

    @property
    def state(self) -> LayerState:
        """The sizes of the layer's state: the rows that the convolution reads again."""
        kept = ceil_to((self.width - 1) * self.hidden, STATE_LINE)
        return LayerState(sequence_elements=kept, ops_per_token=2 * self.width * self.hidden)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the gated convolution [T, hidden] of its input x [T, hidden]."""
        first, second, x = b.split(b.linear(x, self.entering), *(3 * [self.hidden]))
        mixed = b.conv(b.gate(x, first, GateKind.LINEAR), self.taps, layer=self.layer, linear=True)
        return b.linear(b.gate(mixed, second, GateKind.LINEAR), self.o)
