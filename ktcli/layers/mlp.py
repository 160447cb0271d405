"""The feed-forward half of a layer without experts: one dense MLP.

Gate and up are stored as one matrix whose 16-row panels alternate, so that a NUMA node's share of both
is one range and the activation finds both halves in one cache line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.layers.names import USUAL_MLP, MlpNames, Pieces
from ktcli.native import PANEL_ROWS, SILU, Glu
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.scratch import Scratch
from ktcli.ops.tensors import Cut, Role, Stored, Tensor, ceil_to


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x).

    Attributes:
        glu: the activation, where it is another.
        part: what its tensors are counted under.
        layer: number of the decoder layer.
        name: prefix of the stored names, e.g. "layers.0.mlp".
        source: checkpoint prefix, e.g. "model.layers.0.mlp".
    """

    hidden: int
    width: int
    names: MlpNames = USUAL_MLP
    glu: Glu = SILU
    part: ModelPart = ModelPart.DENSE_MLP
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def gate_up(self) -> Tensor:
        shape = (self.width, self.hidden)
        pieces = self._stored(self.names.gate, shape), self._stored(self.names.up, shape)
        if self.names.fused:
            both = self._stored(self.names.fused, (2 * self.width, self.hidden))
            both = replace(both, count=self.width)
            pieces = both, replace(both, first=self.width)
        n = 2 * ceil_to(self.width, PANEL_ROWS)
        return replace(self._matrix("gate_up", n, self.hidden, pieces), alternate=True)

    @cached_property
    def down(self) -> Tensor:
        pieces = (self._stored(self.names.down, (self.hidden, self.width)),)
        return self._matrix("down", self.hidden, self.width, pieces)

    def _stored(self, name: str, shape: tuple[int, int]) -> Stored:
        return Stored(f"{self.source}.{name}", shape)

    def _matrix(self, name: str, n: int, k: int, pieces: Pieces) -> Tensor:
        name, layer = f"{self.name}.{name}", self.layer
        return Tensor(name, n, k, Role.DENSE, (pieces,), layer=layer, cut=Cut.ROWS, part=self.part)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up, self.down

    @property
    def scratch(self) -> Scratch:
        return Scratch.of(self.tensors)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        return b.linear(b.swiglu(b.linear(x, self.gate_up), self.width, self.glu), self.down)
