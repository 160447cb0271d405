"""A gated short convolution in attention's place: its state is the last rows that it reads (LFM2)."""

from __future__ import annotations

from functools import cached_property

from ktcli.layers.stored import LinearPart, conv_elements
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import LayerState
from ktcli.ops.table.rowwise import GateKind
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass


@dataclass(frozen=True)
class ShortConv(LinearPart):
    """out(c * conv(b * x)), where b, c and x are projections of the input, and each column is convolved by itself.

    Source: the LFM2 report, arXiv 2511.23404; transformers 5.23 (lfm2_moe).

    Attributes:
        width: the number of rows that the convolution reads.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.0.conv".
    """

    KIND = "conv"

    hidden: int
    width: int
    layer: int = 0
    source: str = ""

    @cached_property
    def entering(self) -> Tensor:
        """The weight [3 * hidden, hidden] of the stacked projection of the input to b, c and x: the convolution reads b
        * x, and its result is multiplied by c."""
        return self._matrix("in", self.hidden, ("in_proj", 3 * self.hidden))

    @cached_property
    def o(self) -> Tensor:
        """The weight [hidden, hidden] of the output projection."""
        return self._matrix("o", self.hidden, ("out_proj", self.hidden))

    @cached_property
    def taps(self) -> Tensor:
        """The weight of the convolution, `width` rows, for the oldest position first, of one weight for each of the
        `hidden` columns; stored as one vector."""
        return self._taps("taps", "conv", self.hidden, self.width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer's convolution: both projections and the convolution's weight."""
        return self.entering, self.o, self.taps

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: the last width - 1 rows that the convolution read and needs
        again."""
        kept = conv_elements(self.hidden, self.width)
        return LayerState(sequence_elements=kept, ops_per_token=2 * self.width * self.hidden)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the output [T, hidden] of the layer's gated convolution for its input x [T, hidden]."""
        first, second, x = b.split(b.linear(x, self.entering), *(3 * [self.hidden]))
        mixed = b.conv(b.gate(x, first, GateKind.LINEAR), self.taps, layer=self.layer, linear=True)
        return b.linear(b.gate(mixed, second, GateKind.LINEAR), self.o)
