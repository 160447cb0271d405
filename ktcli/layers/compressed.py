"""Attention over a sliding window and over pooled rows of the positions before it (DeepSeek-V4).

Windows of positions are pooled into one row each, and small heads may choose among these. All heads share one key,
which is its own value. Source: DeepSeek-V4 report, section 2.3; transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.stored import StoredPart
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.state import LayerState, Scratch
from ktcli.ops.table.attention import ChooseShape, MqaShape
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.tensors import Stored, Tensor, kept_whole, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class Compressor:
    """Pools each window of positions into one row: by a learned weight for each row and column, a norm, and the
    rotation of the window's first position.

    Attributes:
        rope: the rotation of the last columns.
        name, source: prefixes of stored names, and of the checkpoint's.
    """

    hidden: int
    shape: PoolShape
    rope: Rope
    eps: float
    layer: int = 0
    name: str = ""
    source: str = ""

    @cached_property
    def projection(self) -> Tensor:
        """The weight [2 * columns, hidden] of the stacked projection of the input to the rows that are pooled, then to
        their scores; stored unquantized, as published."""
        shape = (self.shape.columns, self.hidden)
        pieces = (Stored(f"{self.source}.{of}.weight", shape) for of in ("wkv", "wgate"))
        name = f"{self.name}.projection"
        return kept_whole(name, *pieces, layer=self.layer, part=ModelPart.POOLING)

    @cached_property
    def bias(self) -> Tensor:
        """The bias [every, columns] of the pooling scores, one row for each position of a window."""
        shape = (self.shape.every, self.shape.columns)
        return self._vector("bias", Stored(f"{self.source}.ape", shape), neutral=0.0)

    @cached_property
    def norm(self) -> Tensor:
        """The gain [dim] of the RMSNorm of the pooled rows."""
        return self._vector("norm", Stored(f"{self.source}.norm.weight", (self.shape.dim,)))

    def _vector(self, name: str, piece: Stored, neutral: float = 1.0) -> Tensor:
        return vector(f"{self.name}.{name}", piece, layer=self.layer, neutral=neutral)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the compressor: projection, bias and gain of the norm."""
        return self.projection, self.bias, self.norm

    def forward(self, b: Backend, x: Value, first: int) -> Value:
        """Returns the pooled rows [T, dim] of the input x [T, hidden]: one for each token, of which only the rows of
        tokens that complete a window are meaningful.

        Args:
            first: the index of the element of the layer's state at which the compressor's own state begins.
        """
        s, dim = self.shape, self.rope.dim
        rows, scores = b.split(b.linear(x, self.projection), s.columns, s.columns)
        pooled = b.pooling(rows, scores, self.bias, s, layer=self.layer, first=first)
        turn = replace(self.rope, shift=1 - s.every)
        return b.rope(
            b.norm(pooled, self.norm, self.eps), turn, head_width=s.dim, first=s.dim - dim
        )


@dataclass(frozen=True)
class WindowIndexer(StoredPart):
    """Chooses the windows that a token attends to: small heads score the pooled rows of a compressor of its own.

    Attributes:
        compressor: makes the keys; its names are derived from this part's.
        q_lora: width of the query latent.
    """

    hidden: int
    q_lora: int
    shape: ChooseShape
    compressor: Compressor
    layer: int = 0
    source: str = ""

    @cached_property
    def keys(self) -> Compressor:
        """The compressor that makes the index keys, with this indexer's layer number and names."""
        name, source = self._named("index_pool"), f"{self.source}.compressor"
        return replace(self.compressor, layer=self.layer, name=name, source=source)

    @cached_property
    def queries(self) -> Tensor:
        """The weight [heads * dim, q_lora] of the projection of the query latent to the index queries."""
        return self._matrix("index_q", self.q_lora, ("wq_b", self.shape.heads * self.shape.dim))

    @cached_property
    def weights(self) -> Tensor:
        """The weight [heads, hidden] of the projection of the input to one weight for each index head; stored
        unquantized, like a router."""
        stored = Stored(f"{self.source}.weights_proj.weight", (self.shape.heads, self.hidden))
        name = self._named("index_weights")
        return kept_whole(name, stored, layer=self.layer, part=ModelPart.INDEXER)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the indexer, then those of the compressor that makes its keys."""
        return self.queries, self.weights, *self.keys.tensors

    def forward(self, b: Backend, x: Value, latent: Value, first: int) -> None:
        """Chooses the windows of positions that each token attends to; the backend hands the choice to the attention of
        this layer.

        Args:
            x: the attention's input [T, hidden], from which index keys and the weights of heads are computed.
            latent: the query latent [T, q_lora], from which index queries are computed.
            first: the index of the element of the layer's state at which the state of the index keys begins.
        """
        s, rope = self.shape, self.keys.rope
        key = self.keys.forward(b, x, first)
        q = b.rope(b.linear(latent, self.queries), rope, head_width=s.dim, first=s.dim - rope.dim)
        b.choose(q, key, b.linear(x, self.weights, reads=Reads.F32), s, layer=self.layer)


@dataclass(frozen=True)
class CompressedAttention(StoredPart):
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
        name, source = self._named("pool"), f"{self.source}.compressor"
        made = self.compressor
        return made and replace(made, layer=self.layer, name=name, source=source)

    @cached_property
    def _indexer(self) -> WindowIndexer | None:
        made = self.indexer
        return made and replace(made, layer=self.layer, source=f"{self.source}.indexer")

    @cached_property
    def qkv_a(self) -> Tensor:
        """The weight [q_lora + dim, hidden] of the stacked projection of the input to the query latent (q_lora rows),
        then to the key (dim rows)."""
        return self._matrix("qkv_a", self.hidden, ("wq_a", self.q_lora), ("wkv", self.shape.dim))

    @cached_property
    def q_b(self) -> Tensor:
        """The weight [heads * dim, q_lora] of the projection of the query latent to the queries of all heads."""
        return self._matrix("q_b", self.q_lora, ("wq_b", self._width))

    @cached_property
    def o_a(self) -> tuple[Tensor, ...]:
        """The weights of the first output projection: one [o_lora, heads * dim / groups] per group of heads."""
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
        """The weight of the second output projection, [hidden, groups * o_lora]."""
        return self._matrix("o_b", self.groups * self.o_lora, ("wo_b", self.hidden))

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """The gains of the RMSNorms of the query latent, [q_lora], and of the key, [dim]."""
        return (
            self._vector("q_norm", ("q_norm.weight", self.q_lora)),
            self._vector("kv_norm", ("kv_norm.weight", self.shape.dim)),
        )

    @cached_property
    def sinks(self) -> Tensor:
        """The attention sinks [heads]: one more score of each head's softmax."""
        return self._vector("sinks", ("attn_sink", self.shape.heads))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the attention, then those of its compressor and its indexer, if any."""
        own = (self.qkv_a, self.q_b, *self.o_a, self.o_b, *self.norms, self.sinks)
        pool = self._compressor.tensors if self._compressor else ()
        return (*own, *pool, *(self._indexer.tensors if self._indexer else ()))

    @property
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs for projections, the choice of pooled rows
        and partial results of attention."""
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
        """The sizes of one sequence's state in this layer: a fixed part for the sliding window and the unfinished
        windows of pooling, and for each position its share of pooled rows and index keys."""
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
