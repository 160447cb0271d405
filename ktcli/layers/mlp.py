"""The feed-forward half of a layer without experts: one dense MLP.

Gate and up, where there is a gate, are stored as one matrix whose 16-row panels alternate, so that a NUMA node's share
of both is one range and the activation finds both halves in one cache line.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.names import USUAL_MLP, MlpNames, Pieces
from ktcli.native import SILU, Glu
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import LayerPart, ModelPart
from ktcli.ops.state import Projections
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.tensors import Cut, Role, Stored, Tensor, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class DenseMlp(Projections):
    """An MLP: down(silu(gate x) * up x).

    Attributes:
        glu: the activation, where it is another; it may say that there is no gate.
        part: the part of the model that its tensors are counted as.
        bias: whether gate, up and down have biases (Llama's `mlp_bias`).
        layer: number of the decoder layer.
        name: prefix of the stored names, e.g. "layers.0.mlp".
        source: checkpoint prefix, e.g. "model.layers.0.mlp".
    """

    hidden: int
    width: int
    names: MlpNames = USUAL_MLP
    glu: Glu = SILU
    part: ModelPart = ModelPart.DENSE_MLP
    bias: bool = False
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def gate_up(self) -> Tensor:
        """The weight that projects the input to gate and up, [2 * width, hidden]: panels of 16 rows of gate and of up
        alternate, and both are padded to whole panels. Where there is no gate: that of up, [width, hidden]."""
        shape = (self.width, self.hidden)
        up = self._stored(self.names.up, shape)
        if self.glu.ungated:
            return self._matrix("up", self.width, self.hidden, (up,))
        pieces = self._stored(self.names.gate, shape), up
        made = self._matrix("gate_up", self.glu.rows(self.width), self.hidden, pieces)
        if self.names.fused:
            both = self._stored(self.names.fused, (2 * self.width, self.hidden))
            both = replace(both, count=self.width)
            made = replace(made, sources=((both, replace(both, first=self.width)), pieces))
        return replace(made, alternate=True)

    @cached_property
    def down(self) -> Tensor:
        """The weight [hidden, width] that projects the activations to the MLP's output."""
        pieces = (self._stored(self.names.down, (self.hidden, self.width)),)
        return self._matrix("down", self.hidden, self.width, pieces)

    @cached_property
    def gate_up_bias(self) -> Tensor | None:
        """The bias of gate and up, in the order of the rows of `gate_up`; None: there is none."""
        assert not (self.bias and self.glu.ungated), "no family has biases on an MLP without a gate"
        made = self._bias("gate_up_bias", (self.names.gate, self.names.up), self.width)
        return made and replace(made, k=self.glu.rows(self.width), alternate=True)

    @cached_property
    def down_bias(self) -> Tensor | None:
        """The bias [hidden] of the down projection; None: there is none."""
        return self._bias("down_bias", (self.names.down,), self.hidden)

    def _bias(self, name: str, weights: tuple[str, ...], each: int) -> Tensor | None:
        """The biases that lie beside `weights`, of `each` elements."""
        if not self.bias:
            return None
        names = (f"{self.source}.{weight.removesuffix('weight')}bias" for weight in weights)
        stored = (Stored(of, (each,)) for of in names)
        return vector(f"{self.name}.{name}", *stored, layer=self.layer, neutral=0.0)

    def _stored(self, name: str, shape: tuple[int, int]) -> Stored:
        return Stored(f"{self.source}.{name}", shape)

    def _matrix(self, name: str, n: int, k: int, pieces: Pieces) -> Tensor:
        name, layer = f"{self.name}.{name}", self.layer
        return Tensor(name, n, k, Role.DENSE, (pieces,), layer=layer, cut=Cut.ROWS, part=self.part)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the MLP: gate and up, down, and their biases, if any."""
        biases = self.gate_up_bias, self.down_bias
        return (self.gate_up, self.down, *(bias for bias in biases if bias is not None))

    @property
    def _reads(self) -> Reads:
        """How down reads its input, whose largest values are the largest of all: of SmolLM2's KL divergence in int8 a
        quarter came from them. A shared expert's share is small, and with tiles it would take four times as long."""
        return Reads.GROUPS if self.part is ModelPart.DENSE_MLP else Reads.FORMAT

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the MLP's output [T, hidden] of its input x [T, hidden]."""
        return b.block(LayerPart(self.layer, self.part), x, self._computed)

    def _computed(self, b: Backend, x: Value) -> Value:
        both = b.linear(x, self.gate_up, bias=self.gate_up_bias)
        hidden = b.swiglu(both, self.width, self.glu)
        return b.linear(hidden, self.down, bias=self.down_bias, reads=self._reads)
