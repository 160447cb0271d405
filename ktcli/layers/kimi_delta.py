"""Linear attention with one decay for each channel (Kimi Linear, GLM-5.3, Ling 3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.stored import LinearPart, conv_elements
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import LayerState
from ktcli.ops.table.recurrent import DeltaShape
from ktcli.ops.table.rowwise import GateKind, Reads
from ktcli.ops.tensors import Role, Stored, Tensor
from ktcli.records import dataclass


@dataclass(frozen=True)
class KimiDelta(LinearPart):
    """The gated delta rule with one decay for each channel, over q, k and v of short causal convolutions; its norm is
    gated by the sigmoid of a low-rank projection, and the decay is a low-rank projection, too.

    Sources: Kimi Linear, arXiv 2510.26692; transformers 5.23 (glm5_next, bailing_hybrid).

    Attributes:
        conv_width: the number of rows that the convolutions read.
        direct: whether the projections of gate and decay have full rank (Ling 3).
        o_names: checkpoint names of the last projection.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.language_model.layers.2.self_attn".
    """

    KIND = "delta"

    hidden: int
    shape: DeltaShape
    conv_width: int
    eps: float
    direct: bool = False
    o_names: tuple[str, ...] = ("o_proj",)
    layer: int = 0
    source: str = ""

    @property
    def _entering(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """The names and rows of the first projections of gate and decay."""
        s = self.shape
        if self.direct:
            return ("g_proj", self.shape.columns[2]), ("f_proj", s.decays)
        return ("g_a_proj", s.dk), ("f_a_proj", s.dk)

    @cached_property
    def qkvg(self) -> Tensor:
        """The weight [rows, hidden] of the stacked projection of the input to q, k and v, each for all heads, then to
        the gate of the norm: if `direct`, to the gate itself, otherwise to its dk low-rank columns."""
        qkv = zip(("q_proj", "k_proj", "v_proj"), self.shape.columns, strict=True)
        return self._matrix("qkvg", self.hidden, *qkv, self._entering[0])

    @cached_property
    def gates(self) -> Tensor:
        """The weight [rows, hidden] of the stacked projection of the input to each head's learning rate, then to the
        decay: if `direct`, to the decay itself, otherwise to its dk low-rank columns. Stored unquantized, as errors
        add up over the tokens."""
        pieces = ("b_proj", self.shape.heads), self._entering[1]
        return self._matrix("gates", self.hidden, *pieces, role=Role.KEPT)

    @cached_property
    def decay(self) -> Tensor | None:
        """The weight [decays, dk] of the second projection of the low-rank decay, to one row for each channel that
        decays; None: `gates` projects to the decay itself."""
        if self.direct:
            return None
        s = self.shape
        return self._matrix("decay", s.dk, ("f_b_proj", s.decays), role=Role.KEPT)

    @cached_property
    def gate(self) -> Tensor | None:
        """The weight [heads * dv, dk] of the second projection of the low-rank gate of the norm; None: `qkvg` projects
        to the gate itself."""
        if self.direct:
            return None
        return self._matrix("gate", self.shape.dk, ("g_b_proj", self.shape.columns[2]))

    @cached_property
    def o(self) -> Tensor:
        """The weight [hidden, heads * dv] of the output projection, which is read under whichever of its names the
        checkpoint has."""
        columns = self.shape.columns[2]
        ways = [self._matrix("o", columns, (name, self.hidden)) for name in self.o_names]
        return replace(ways[0], sources=tuple(pieces for way in ways for pieces in way.sources))

    @cached_property
    def convs(self) -> tuple[Tensor, ...]:
        """The weights of the three causal convolutions over q, k and v: conv_width rows, for the oldest position first,
        of one weight for each column."""
        return tuple(
            self._taps(f"{of}_conv", f"{of}_conv1d", width, self.conv_width)
            for of, width in zip("qkv", self.shape.columns, strict=True)
        )

    @cached_property
    def learned(self) -> tuple[Tensor, Tensor]:
        """Two learned vectors: the log of each head's decay rate, [heads], and the bias of each channel's decay,
        [decays]."""
        heads = self.shape.heads
        rate = self._vector("log_rate", ("A_log", heads))
        # Kimi Linear's has the rank of what it multiplies.
        deep = Stored(f"{self.source}.A_log", (1, 1, heads, 1))
        bias = self._vector("rate_bias", ("dt_bias", self.shape.decays), neutral=0.0)
        return replace(rate, sources=(*rate.sources, (deep,))), bias

    @cached_property
    def norm(self) -> Tensor:
        """The gain [dv] of the norm of each head's output."""
        return self._vector("norm", ("o_norm.weight", self.shape.dv))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer's linear attention: projections, convolutions, the vectors of the decay, and
        the norm's gain."""
        matrices = self.qkvg, self.gates, self.decay, self.gate, self.o
        return (*(m for m in matrices if m is not None), *self.convs, *self.learned, self.norm)

    @property
    def _conv_elements(self) -> tuple[int, ...]:
        """The f32 elements of the states of the convolutions."""
        return tuple(conv_elements(columns, self.conv_width) for columns in self.shape.columns)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: the last rows that the convolutions read, then each head's
        matrix S [dk, dv], with 7 operations per element and token."""
        s = self.shape
        ops = 7 * s.heads * s.dk * s.dv + 2 * self.conv_width * sum(self.shape.columns)
        elements = sum(self._conv_elements) + s.state_elements
        return LayerState(sequence_elements=elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the output [T, hidden] of the layer's linear attention for its input x [T, hidden]."""
        s, first, mixed = self.shape, 0, []
        (_, of_gate), (_, of_decay) = self._entering
        *qkv, gate = b.split(b.linear(x, self.qkvg), *self.shape.columns, of_gate)
        beta, decay = b.split(b.linear(x, self.gates, reads=Reads.F32), s.heads, of_decay)
        if self.decay:
            decay = b.linear(decay, self.decay, reads=Reads.F32)
        for each, weight, elements in zip(qkv, self.convs, self._conv_elements, strict=True):
            mixed.append(b.conv(each, weight, layer=self.layer, first=first))
            first += elements
        q, k, v = mixed
        out = b.delta(q, k, v, decay, beta, *self.learned, s, layer=self.layer, first=first)
        out = b.norm(out, self.norm, self.eps, head_width=s.dv)
        gate = b.linear(gate, self.gate) if self.gate else gate
        return b.linear(b.gate(out, gate, GateKind.SIGMOID), self.o)
