"""Linear attention with one decay for each head: its state has a fixed size and does not grow with the positions
(Qwen3-Next).

Qwen3.5 has it too.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain

from ktcli.layers.stored import LinearPart, by_head, conv_elements
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import LayerState
from ktcli.ops.table.recurrent import DeltaShape
from ktcli.ops.table.rowwise import GateKind, Reads
from ktcli.ops.tensors import Role, Stored, Tensor
from ktcli.records import dataclass


@dataclass(frozen=True)
class GatedDeltaNet(LinearPart):
    """The gated delta rule over q, k and v of a short causal convolution, with a norm gated by z.

    Source: Gated Delta Networks, arXiv 2412.06464.

    Attributes:
        conv_width: the number of rows that the convolution reads.
        by_head: whether the checkpoint has q, k, v, z in one tensor, key head by key head, and b, a in another
            (Qwen3-Next); otherwise [q | k | v], z, b and a are tensors of their own (Qwen3.5).
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.2.linear_attn".
    """

    KIND = "delta"

    hidden: int
    shape: DeltaShape
    conv_width: int
    eps: float
    by_head: bool
    layer: int = 0
    source: str = ""

    @cached_property
    def qkvz(self) -> Tensor:
        """The weight [2 * key_heads * dk + 2 * heads * dv, hidden] of the stacked projection of the input to q, k, v
        and z, the gate of the norm, each for all heads; dk and dv are the columns of a key head and of a value head."""
        s, (keys, _, values) = self.shape, self.shape.columns
        if self.by_head:
            each = s.heads // s.key_heads * s.dv
            whole = Stored(f"{self.source}.in_proj_qkvz.weight", (2 * (keys + values), self.hidden))
            return self._projection("qkvz", *chain(*by_head(whole, s.dk, s.dk, each, each)))
        pieces = ("in_proj_qkv", 2 * keys + values), ("in_proj_z", values)
        return self._matrix("qkvz", self.hidden, *pieces)

    @cached_property
    def gates(self) -> Tensor:
        """The weight [2 * heads, hidden] of the stacked projection of the input to each head's learning rate, then to
        each head's decay; stored unquantized, as errors add up over the tokens."""
        s = self.shape
        if self.by_head:
            each = s.heads // s.key_heads
            whole = Stored(f"{self.source}.in_proj_ba.weight", (2 * s.heads, self.hidden))
            return self._projection("gates", *chain(*by_head(whole, each, each)), role=Role.KEPT)
        pieces = ("in_proj_b", s.heads), ("in_proj_a", s.heads)
        return self._matrix("gates", self.hidden, *pieces, role=Role.KEPT)

    @cached_property
    def conv(self) -> Tensor:
        """The weight of the causal convolution over q, k and v: conv_width rows, for the oldest position first, of one
        weight for each column of q, k and v."""
        return self._taps("conv", "conv1d", sum(self.shape.columns), self.conv_width)

    @cached_property
    def learned(self) -> tuple[Tensor, Tensor]:
        """Two learned vectors [heads]: the log of each head's decay rate, and the bias of its decay."""
        heads = self.shape.heads
        bias = self._vector("rate_bias", ("dt_bias", heads), neutral=0.0)
        return self._vector("log_rate", ("A_log", heads)), bias

    @cached_property
    def norm(self) -> Tensor:
        """The gain [dv] of the norm of each head's output; dv is the columns of a value head."""
        return self._vector("norm", ("norm.weight", self.shape.dv))

    @cached_property
    def o(self) -> Tensor:
        """The weight of the output projection, [hidden, heads * dv]."""
        return self._matrix("o", self.shape.columns[2], ("out_proj", self.hidden))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer's linear attention: projections, convolution, the vectors of the decay, and
        the norm's gain."""
        return (self.qkvz, self.gates, self.o, self.conv, *self.learned, self.norm)

    @property
    def _conv_elements(self) -> int:
        return conv_elements(sum(self.shape.columns), self.conv_width)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: the last rows that the convolution read, then each head's
        matrix S [dk, dv], with 7 operations per element and token."""
        s = self.shape
        ops = 7 * s.heads * s.dk * s.dv + 2 * self.conv_width * sum(self.shape.columns)
        elements = self._conv_elements + s.state_elements
        return LayerState(sequence_elements=elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the output [T, hidden] of the layer's linear attention for its input x [T, hidden]."""
        s, (keys, _, values) = self.shape, self.shape.columns
        qkv, z = b.split(b.linear(x, self.qkvz), 2 * keys + values, values)
        beta, decay = b.split(b.linear(x, self.gates, reads=Reads.F32), s.heads, s.heads)
        q, k, v = b.split(b.conv(qkv, self.conv, layer=self.layer), *self.shape.columns)
        first, learned = self._conv_elements, self.learned
        mixed = b.delta(q, k, v, decay, beta, *learned, s, layer=self.layer, first=first)
        mixed = b.norm(mixed, self.norm, self.eps, head_width=s.dv)
        return b.linear(b.gate(mixed, z, GateKind.SILU), self.o)
