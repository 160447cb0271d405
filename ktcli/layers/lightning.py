"""Lightning attention: linear attention in which the state of every head decays at a fixed rate (MiniMax-Text-01,
M1)."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

from ktcli.layers.stored import LinearPart, by_head
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import LayerState
from ktcli.ops.table.recurrent import LightningShape
from ktcli.ops.table.rowwise import GateKind
from ktcli.ops.tensors import Stored, Tensor
from ktcli.records import dataclass

_EPS = 1e-6  # of the norm, whatever the config says of the others
_LAST = 1e-5  # keeps the rates of the last layer above zero


@dataclass(frozen=True)
class LightningAttention(LinearPart):
    """A state of each head over silu of q, k and v, with a norm of all heads together and a gate on its columns.

    Sources: MiniMax-01, arXiv 2501.08313; transformers 5.23 (minimax).

    Attributes:
        n_layers: the number of layers of the model: the later one is, the slower its states decay.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.2.self_attn".
    """

    KIND = "lightning"

    hidden: int
    heads: int
    head_dim: int
    n_layers: int
    layer: int = 0
    source: str = ""

    @property
    def _inner(self) -> int:
        """The number of columns of each of q, k, v, gate and result, of all heads."""
        return self.heads * self.head_dim

    @cached_property
    def shape(self) -> LightningShape:
        """The number of heads, their columns, and the rate at which each head's state decays: as the slopes of ALiBi,
        and smaller in later layers."""
        part = 1 - self.layer / (self.n_layers - 1 + _LAST) + _LAST
        rates = (2 ** (-8 * (head + 1) / self.heads) * part for head in range(self.heads))
        return LightningShape(self.heads, self.head_dim, tuple(rates))

    @cached_property
    def qkvg(self) -> Tensor:
        """The weight [4 * heads * head_dim, hidden] of the stacked projection of the input to q, k, v and the gate,
        each for all heads."""
        qkv = Stored(f"{self.source}.qkv_proj.weight", (3 * self._inner, self.hidden))
        gate = Stored(f"{self.source}.output_gate.weight", (self._inner, self.hidden))
        return self._projection("qkvg", *chain(*by_head(qkv, *3 * [self.head_dim])), gate)

    @cached_property
    def o(self) -> Tensor:
        """The weight of the output projection, [hidden, heads * head_dim]."""
        return self._matrix("o", self._inner, ("out_proj", self.hidden))

    @cached_property
    def norm(self) -> Tensor:
        """The gain [heads * head_dim] of the RMSNorm of the result of all heads together."""
        return self._vector("norm", ("norm.weight", self._inner))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer's attention: both projections and the norm's gain."""
        return (self.qkvg, self.o, self.norm)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: each head's matrix S [head_dim, head_dim], with 5 operations
        per element and token."""
        ops = 5 * self._inner * self.head_dim
        return LayerState(sequence_elements=self.shape.state_elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the output [T, hidden] of the layer's attention for its input x [T, hidden]."""
        qkv, gate = b.split(b.linear(x, self.qkvg), 3 * self._inner, self._inner)
        q, k, v = b.split(b.gate(qkv, qkv, GateKind.SIGMOID), *3 * [self._inner])  # silu
        mixed = b.lightning(q, k, v, self.shape, layer=self.layer, first=0)
        mixed = b.norm(mixed, self.norm, _EPS)
        return b.linear(b.gate(mixed, gate, GateKind.SIGMOID), self.o)
