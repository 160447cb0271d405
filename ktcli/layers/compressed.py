"""Attention over a sliding window and over pooled rows of the positions before it (DeepSeek-V4).

All heads share one key, which is its own value. Source: DeepSeek-V4 report, section 2.3; transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.compressor import Compressor, WindowIndexer
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.scratch import Scratch
from ktcli.ops.state import LayerState
from ktcli.ops.table.attention import MqaShape
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Rope
from ktcli.ops.tensors import Stored, Tensor, matrix, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class CompressedAttention:
    """Multi-query attention whose key is its value, so that its output is rotated back.

    Attributes:
        rope: the rotation of the last columns of each head.
        groups, o_lora: the output projection is one of each group of heads, to o_lora columns, then one of all.
        compressor: makes the pooled rows; None: a token attends to the window alone.
        indexer: chooses among pooled rows; None: a token attends to all.
        layer: number of the decoder layer.
        source: checkpoint prefix of the attention.
    """

    hidden: int
    q_lora: int
    shape: MqaShape
    rope: Rope
    eps: float
    groups: int
    o_lora: int
    compressor: Compressor | None = None
    indexer: WindowIndexer | None = None
    layer: int = 0
    source: str = ""

    @property
    def _width(self) -> int:
        return self.shape.heads * self.shape.dim

    @cached_property
    def _compressor(self) -> Compressor | None:
        name, source = f"layers.{self.layer}.attn.pool", f"{self.source}.compressor"
        made = self.compressor
        return made and replace(made, layer=self.layer, name=name, source=source)

    @cached_property
    def _indexer(self) -> WindowIndexer | None:
        made = self.indexer
        return made and replace(made, layer=self.layer, source=f"{self.source}.indexer")

    @cached_property
    def qkv_a(self) -> Tensor:
        """The projection [q_lora + dim, hidden] of the input to the query latent, then to the key."""
        return self._matrix("qkv_a", self.hidden, ("wq_a", self.q_lora), ("wkv", self.shape.dim))

    @cached_property
    def q_b(self) -> Tensor:
        """The projection [heads * dim, q_lora] of the query latent to the queries of all heads."""
        return self._matrix("q_b", self.q_lora, ("wq_b", self._width))

    @cached_property
    def o_a(self) -> tuple[Tensor, ...]:
        """The first output projection, one matrix [o_lora, width of a group] for each group of heads; the
        checkpoint has them one below the other."""
        shape = (self.groups * self.o_lora, self._width // self.groups)
        whole_one = Stored(f"{self.source}.wo_a.weight", shape, count=self.o_lora)
        made = self._matrix("o_a", shape[1], ("wo_a", self.o_lora))
        return tuple(
            replace(
                made,
                name=f"{made.name}.{g}",
                sources=((replace(whole_one, first=g * self.o_lora),),),
            )
            for g in range(self.groups)
        )

    @cached_property
    def o_b(self) -> Tensor:
        """The second output projection, [hidden, groups * o_lora]."""
        return self._matrix("o_b", self.groups * self.o_lora, ("wo_b", self.hidden))

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """The gains of the norms of the query latent and of the key."""
        return (
            self._vector("q_norm", "q_norm.weight", self.q_lora),
            self._vector("kv_norm", "kv_norm.weight", self.shape.dim),
        )

    @cached_property
    def sinks(self) -> Tensor:
        """The sinks [heads], one more score of each head's softmax."""
        return self._vector("sinks", "attn_sink", self.shape.heads)

    def _matrix(self, name: str, k: int, *pieces: tuple[str, int]) -> Tensor:
        stored = (Stored(f"{self.source}.{of}.weight", (rows, k)) for of, rows in pieces)
        name = f"layers.{self.layer}.attn.{name}"
        return matrix(name, *stored, layer=self.layer, part=ModelPart.ATTENTION)

    def _vector(self, name: str, source: str, length: int) -> Tensor:
        stored = Stored(f"{self.source}.{source}", (length,))
        return vector(f"layers.{self.layer}.attn.{name}", stored, layer=self.layer)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the attention, then those of its compressor and its indexer, if any."""
        own = (self.qkv_a, self.q_b, *self.o_a, self.o_b, *self.norms, self.sinks)
        pool = self._compressor.tensors if self._compressor else ()
        return (*own, *pool, *(self._indexer.tensors if self._indexer else ()))

    @property
    def scratch(self) -> Scratch:
        """The buffer widths that its projections, the choice of pooled rows and partial results need in a step."""
        made, index = Scratch.of(self.tensors), self.indexer.shape if self.indexer else None
        if index is None:
            return replace(made, partials=self.shape.partials)
        return replace(made, chosen=index.top_k, partials=index.partials)

    @property
    def _pools(self) -> tuple[PoolShape, ...]:
        """The pools of compressor and indexer."""
        parts = (self.compressor, self.indexer and self.indexer.compressor)
        return tuple(part.shape for part in parts if part)

    @property
    def state(self) -> LayerState:
        """The sizes of the layer's state: the window and open windows, whatever the length; pooled rows, and index
        keys behind them."""
        s, index = self.shape, self.indexer.shape if self.indexer else None
        per_key = 4 * s.heads * s.dim
        return LayerState(
            position_elements=s.paged + s.beside,
            sequence_elements=s.state_elements + sum(pool.state_elements for pool in self._pools),
            ops_per_token=s.window * per_key,
            ops_per_position=per_key // s.every if s.every else 0,
            chosen=index.positions if index else 0,
            index_elements=s.beside,
            index_ops=2 * index.heads * index.dim // index.every if index else 0,
        )

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the attention's output [T, hidden] of its input x [T, hidden]."""
        s, at = self.shape, self.shape.dim - self.rope.dim
        latent, kv = b.split(b.linear(x, self.qkv_a), self.q_lora, s.dim)
        latent = b.norm(latent, self.norms[0], self.eps)
        q = b.norm(b.linear(latent, self.q_b), None, self.eps, head_width=s.dim)
        q = b.rope(q, self.rope, head_width=s.dim, first=at)
        kv = b.rope(b.norm(kv, self.norms[1], self.eps), self.rope, head_width=s.dim, first=at)
        first, pooled = s.state_elements, None
        if self._compressor:
            pooled = self._compressor.forward(b, x, first)
            first += self._compressor.shape.state_elements
        if self._indexer:
            self._indexer.forward(b, x, latent, first)
        chosen = self._indexer is not None
        mixed = b.mqa(q, kv, pooled, s, layer=self.layer, first=0, sinks=self.sinks, chosen=chosen)
        back = replace(self.rope, inv_freq=tuple(-f for f in self.rope.inv_freq))
        mixed = b.rope(mixed, back, head_width=s.dim, first=at)  # [T, heads * dim]
        return b.linear(b.grouped(mixed, self.o_a), self.o_b)
