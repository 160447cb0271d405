"""Linear attention: layers that keep a state of fixed size instead of every position (Qwen3-Next, Qwen3.5; with a
decay of each channel Kimi Linear, GLM-5.3, Ling 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.scratch import Scratch
from ktcli.ops.state import LayerState
from ktcli.ops.table.recurrent import DeltaShape
from ktcli.ops.table.rowwise import GateKind, Reads
from ktcli.ops.tensors import Role, Stored, Tensor, ceil_to, matrix, vector

_LINE = 16  # f32 elements: where a part of the state begins


@dataclass(frozen=True)
class GatedDeltaNet:
    """q, k and v through a short causal convolution; the gated delta rule; a norm gated by z.

    Source: Gated Delta Networks, arXiv 2412.06464.

    Attributes:
        conv_width: rows that the convolution sees.
        by_head: the checkpoint has q, k, v, z in one tensor, key head by key head, and b, a in another
            (Qwen3-Next); else [q | k | v], z, b and a are tensors of their own (Qwen3.5).
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.2.linear_attn".
    """

    hidden: int
    shape: DeltaShape
    conv_width: int
    eps: float
    by_head: bool
    layer: int = 0
    source: str = ""

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        s = self.shape
        return s.key_heads * s.dk, s.key_heads * s.dk, s.heads * s.dv

    @cached_property
    def qkvz(self) -> Tensor:
        s, (keys, _, values) = self.shape, self._widths
        each = s.heads // s.key_heads * s.dv
        sizes = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        pieces = self._by_head("in_proj_qkvz", (s.dk, s.dk, each, each))
        return self._matrix("qkvz", pieces if self.by_head else self._whole(sizes))

    @cached_property
    def gates(self) -> Tensor:
        """How much is learned of a token, and how much is forgotten before: kept in bf16, as what they
        lose adds up over the tokens."""
        s = self.shape
        each = s.heads // s.key_heads
        sizes = {"in_proj_b": s.heads, "in_proj_a": s.heads}
        pieces = self._by_head("in_proj_ba", (each, each))
        pieces = pieces if self.by_head else self._whole(sizes)
        return self._matrix("gates", pieces, Role.KEPT)

    @cached_property
    def conv(self) -> Tensor:
        shape = (sum(self._widths), 1, self.conv_width)
        return self._vector("conv", Stored(f"{self.source}.conv1d.weight", shape, transposed=True))

    @cached_property
    def learned(self) -> tuple[Tensor, Tensor]:
        """Log of each head's rate of forgetting, and what is added before."""
        shape = (self.shape.heads,)
        return (
            self._vector("log_rate", Stored(f"{self.source}.A_log", shape)),
            self._vector("rate_bias", Stored(f"{self.source}.dt_bias", shape), neutral=0.0),
        )

    @cached_property
    def norm(self) -> Tensor:
        return self._vector("norm", Stored(f"{self.source}.norm.weight", (self.shape.dv,)))

    @cached_property
    def o(self) -> Tensor:
        stored = Stored(f"{self.source}.out_proj.weight", (self.hidden, self._widths[2]))
        return self._matrix("o", (stored,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.qkvz, self.gates, self.o, self.conv, *self.learned, self.norm)

    @property
    def _conv_elements(self) -> int:
        return ceil_to((self.conv_width - 1) * sum(self._widths), _LINE)

    @property
    def scratch(self) -> Scratch:
        return Scratch.of(self.tensors)

    @property
    def state(self) -> LayerState:
        """The convolution's last rows, then S of every head, of which an element takes 7 operations."""
        s = self.shape
        ops = 7 * s.heads * s.dk * s.dv + 2 * self.conv_width * sum(self._widths)
        elements = self._conv_elements + s.state_elements
        return LayerState(sequence_elements=elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        s, (keys, _, values) = self.shape, self._widths
        qkv, z = b.split(b.linear(x, self.qkvz), 2 * keys + values, values)
        beta, decay = b.split(b.linear(x, self.gates, reads=Reads.F32), s.heads, s.heads)
        q, k, v = b.split(b.conv(qkv, self.conv, layer=self.layer), *self._widths)
        first, learned = self._conv_elements, self.learned
        mixed = b.delta(q, k, v, decay, beta, *learned, s, layer=self.layer, first=first)
        mixed = b.norm(mixed, self.norm, self.eps, head_width=s.dv)
        return b.linear(b.gate(mixed, z, GateKind.SILU), self.o)

    def _by_head(self, name: str, parts: tuple[int, ...]) -> tuple[Stored, ...]:
        """All heads' first part, all heads' second part … of a tensor that holds head by head."""
        heads, each = self.shape.key_heads, sum(parts)
        shape = (heads * each, self.hidden)

        def rows() -> Iterator[Stored]:
            for i, count in enumerate(parts):
                for head in range(heads):
                    first = head * each + sum(parts[:i])
                    yield Stored(f"{self.source}.{name}.weight", shape, first=first, count=count)

        return tuple(rows())

    def _whole(self, sizes: dict[str, int]) -> tuple[Stored, ...]:
        return tuple(
            Stored(f"{self.source}.{name}.weight", (n, self.hidden)) for name, n in sizes.items()
        )

    def _matrix(self, name: str, pieces: tuple[Stored, ...], role: Role = Role.DENSE) -> Tensor:
        return _matrix(f"layers.{self.layer}.delta.{name}", pieces, role, self.layer)

    def _vector(self, name: str, piece: Stored, neutral: float = 1.0) -> Tensor:
        name = f"layers.{self.layer}.delta.{name}"
        return vector(name, piece, layer=self.layer, neutral=neutral)


@dataclass(frozen=True)
class KimiDelta:
    """q, k and v through a short causal convolution each; the gated delta rule, whose decay is each channel's own;
    a norm gated by the sigmoid of a projection through few columns, as the decay is one.

    Sources: Kimi Linear, arXiv 2510.26692; transformers 5.23 (glm5_next, bailing_hybrid).

    Attributes:
        conv_width: rows that the convolutions see.
        direct: the projections of gate and decay do not go through few columns (Ling 3).
        o_names: what checkpoints call the last projection.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.language_model.layers.2.self_attn".
    """

    hidden: int
    shape: DeltaShape
    conv_width: int
    eps: float
    direct: bool = False
    o_names: tuple[str, ...] = ("o_proj",)
    layer: int = 0
    source: str = ""

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v."""
        s = self.shape
        return s.key_heads * s.dk, s.key_heads * s.dk, s.heads * s.dv

    @property
    def _entering(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """(name, rows) of the projections that gate and decay begin with."""
        s = self.shape
        if self.direct:
            return ("g_proj", self._widths[2]), ("f_proj", s.decays)
        return ("g_a_proj", s.dk), ("f_a_proj", s.dk)

    @cached_property
    def qkvg(self) -> Tensor:
        """q, k, v, and what the gate of the norm is made of."""
        named = dict(zip(("q_proj", "k_proj", "v_proj"), self._widths, strict=True))
        gate, rows = self._entering[0]
        return self._matrix("qkvg", Role.DENSE, {**named, gate: rows}, self.hidden)

    @cached_property
    def gates(self) -> Tensor:
        """How much is learned of a token, and what the decay is made of: kept in bf16, as what they lose adds up
        over the tokens."""
        decay, rows = self._entering[1]
        sizes = {"b_proj": self.shape.heads, decay: rows}
        return self._matrix("gates", Role.KEPT, sizes, self.hidden)

    @cached_property
    def decay(self) -> Tensor | None:
        if self.direct:
            return None
        return self._matrix("decay", Role.KEPT, {"f_b_proj": self.shape.decays}, self.shape.dk)

    @cached_property
    def gate(self) -> Tensor | None:
        if self.direct:
            return None
        return self._matrix("gate", Role.DENSE, {"g_b_proj": self._widths[2]}, self.shape.dk)

    @cached_property
    def o(self) -> Tensor:
        ways = [
            self._matrix("o", Role.DENSE, {name: self.hidden}, self._widths[2])
            for name in self.o_names
        ]
        return replace(ways[0], sources=tuple(pieces for way in ways for pieces in way.sources))

    @cached_property
    def convs(self) -> tuple[Tensor, ...]:
        """Of q, k and v."""
        return tuple(
            self._vector(f"{of}_conv", f"{of}_conv1d.weight", (width, 1, self.conv_width))
            for of, width in zip("qkv", self._widths, strict=True)
        )

    @cached_property
    def learned(self) -> tuple[Tensor, Tensor]:
        """Log of each head's rate of forgetting, and what is added before to each channel."""
        rate = self._vector("log_rate", "A_log", (self.shape.heads,))
        return rate, self._vector("rate_bias", "dt_bias", (self.shape.decays,), neutral=0.0)

    @cached_property
    def norm(self) -> Tensor:
        return self._vector("norm", "o_norm.weight", (self.shape.dv,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        matrices = self.qkvg, self.gates, self.decay, self.gate, self.o
        return (*(m for m in matrices if m is not None), *self.convs, *self.learned, self.norm)

    @property
    def _conv_elements(self) -> tuple[int, ...]:
        """Of the states of the convolutions."""
        return tuple(ceil_to((self.conv_width - 1) * width, _LINE) for width in self._widths)

    @property
    def scratch(self) -> Scratch:
        return Scratch.of(self.tensors)

    @property
    def state(self) -> LayerState:
        """The convolutions' last rows, then S of every head, of which an element takes 7 operations."""
        s = self.shape
        ops = 7 * s.heads * s.dk * s.dv + 2 * self.conv_width * sum(self._widths)
        elements = sum(self._conv_elements) + s.state_elements
        return LayerState(sequence_elements=elements, ops_per_token=ops)

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        s, first, mixed = self.shape, 0, []
        (_, of_gate), (_, of_decay) = self._entering
        *qkv, gate = b.split(b.linear(x, self.qkvg), *self._widths, of_gate)
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

    def _matrix(self, name: str, role: Role, sizes: dict[str, int], k: int) -> Tensor:
        """Of projections that lie one below the other, {name: rows}."""
        pieces = tuple(Stored(f"{self.source}.{of}.weight", (n, k)) for of, n in sizes.items())
        return _matrix(f"layers.{self.layer}.delta.{name}", pieces, role, self.layer)

    def _vector(
        self, name: str, source: str, shape: tuple[int, ...], neutral: float = 1.0
    ) -> Tensor:
        piece = Stored(f"{self.source}.{source}", shape, transposed=len(shape) > 1)
        name = f"layers.{self.layer}.delta.{name}"
        return vector(name, piece, layer=self.layer, neutral=neutral)


def _matrix(name: str, pieces: tuple[Stored, ...], role: Role, layer: int) -> Tensor:
    """A projection of a layer with linear attention; what is kept exact are its gates."""
    part = ModelPart.LINEAR if role is Role.DENSE else ModelPart.LINEAR_GATES
    return matrix(name, *pieces, role=role, layer=layer, part=part)
