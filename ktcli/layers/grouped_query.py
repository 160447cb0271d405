"""Attention whose query heads share key/value heads (Qwen, Llama, gpt-oss …).

Projections that read the same input are stored as one matrix: one quantisation of the input and one
barrier instead of three.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import cached_property

from ktcli.layers.gates import OwnGates, QueryGates
from ktcli.layers.indexer import BlockIndexer
from ktcli.layers.stored import StoredPart, by_head
from ktcli.ops.backend import Backend, Value
from ktcli.ops.state import GQA_SPLIT_PAGES, LayerState, Scratch
from ktcli.ops.table.attention import GqaShape
from ktcli.ops.table.rowwise import Rope, Temper
from ktcli.ops.tensors import Stored, Tensor, ceil_to
from ktcli.records import dataclass


class NormedQk(Enum):
    """The extent of the norms of q and k, and their place before or after the rotation."""

    HEADS = "heads"  # each head, before the rotation (Qwen3)
    ROTATED = "rotated"  # each head, after the rotation (Hunyuan)
    ROWS = "rows"  # all heads together, before the rotation (MiniMax-M2)


@dataclass(frozen=True, slots=True)
class QkNorms:
    """RMSNorms of q and k.

    Attributes:
        of: the extent and place of the norms.
        names: their checkpoint names.
        plus: the number added to their weights.
        values: whether each head's values have one, too, without a weight (Gemma 4).
        weighted: whether those of q and k have weights (Llama 4's have none).
    """

    of: NormedQk = NormedQk.HEADS
    names: tuple[str, str] = ("q_norm", "k_norm")
    plus: float = 0.0
    values: bool = False
    weighted: bool = True


@dataclass(frozen=True, slots=True)
class GqaNames:
    """The checkpoint names of the projections, below the attention.

    Attributes:
        fused: that of one projection to q, k and v, where a checkpoint has it (Ling); "": there is none.
    """

    o: str = "o_proj"
    fused: str = ""


USUAL_GQA = GqaNames()


@dataclass(frozen=True)
class GroupedQueryAttention(StoredPart):
    """Attention whose query heads share key/value heads.

    Attributes:
        rope: the rotation, which may be of only the first columns of each head; None: the layer has no positions
            (K-EXAONE's without a window).
        norms: the norms of q and k; None: there are none.
        qkv_bias, o_bias: whether q, k and v have biases; whether o has one.
        sinks_name: checkpoint name of the sinks, one more score of each head's softmax (gpt-oss); "": there are none.
        value_scale: the factor of the values (MiMo-V2).
        keys_as_values: whether values are what the projection of keys gives, before norm and rotation (Gemma 4). Its
            rows are stored twice: of 26B-A4B's, which few layers have, that is 0.4 % of what a token reads.
        gates: the gates on the heads' outputs; None: there are none. They exclude biases.
        indexer: chooses the blocks of positions that a token attends to, for each kv head; None: it attends to all. Its
            projections lie behind those of q, k and v.
        projections: the names of the projections.
        temper: what queries are multiplied by, by their positions (Llama 4); None: nothing.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.3.self_attn".
    """

    hidden: int
    shape: GqaShape
    rope: Rope | None
    eps: float
    norms: QkNorms | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    sinks_name: str = ""
    value_scale: float = 1.0
    keys_as_values: bool = False
    gates: OwnGates | QueryGates | None = None
    indexer: BlockIndexer | None = None
    projections: GqaNames = USUAL_GQA
    temper: Temper | None = None
    layer: int = 0
    source: str = ""

    def within(self, window: int) -> GroupedQueryAttention:
        """Returns a copy of this attention with a sliding window of `window` positions; 0: a token attends to all
        positions."""
        return replace(self, shape=replace(self.shape, window=window))

    def in_chunks(self, width: int) -> GroupedQueryAttention:
        """Returns a copy of this attention in which a token attends only to positions in its own chunk; chunks have
        `width` positions and begin at multiples of `width`."""
        return replace(self, shape=replace(self.shape, window=width, chunked=True))

    @property
    def _widths(self) -> tuple[int, int, int]:
        s = self.shape
        return s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.value_dim

    @property
    def _gate_widths(self) -> tuple[int, ...]:
        s = self.shape
        return (self.gates.width(s.heads, s.value_dim),) if self.gates else ()

    @cached_property
    def qkv(self) -> Tensor:
        """The weight [rows, hidden] of the stacked projection of the input to q, k and v and, where there are any, to
        index queries, the index key and the gates, in this order."""
        pieces = self._projections("weight")
        index = self.indexer.projections if self.indexer else ()
        own = isinstance(self.gates, OwnGates) and f"{self.gates.source}.weight"
        gates_of = ((own, *self._gate_widths),) if own else ()
        queries, *others = (
            Stored(f"{self.source}.{name}", (rows, self.hidden))
            for name, rows in (*pieces, *index, *gates_of)
        )
        stored = (queries, *others)
        if isinstance(self.gates, QueryGates):
            both = replace(queries, shape=(2 * self._widths[0], self.hidden))
            first, second = by_head(both, *2 * [self.shape.head_dim])
            stored = (*first, *others, *second)
        return self._or_fused(self._projection("qkv", *stored), "weight", (self.hidden,))

    def _or_fused(self, made: Tensor, end: str, columns: tuple[int, ...]) -> Tensor:
        """What is made of three projections, or of one where a checkpoint has that."""
        if not self.projections.fused:
            return made
        name = f"{self.source}.{self.projections.fused}.{end}"
        return replace(
            made, sources=((Stored(name, (sum(self._widths), *columns)),), *made.sources)
        )

    def _projections(self, of: str) -> tuple[tuple[str, int], ...]:
        """Returns the names of the weights or biases that project to q, k and v, and the rows of each."""
        letters = "qkk" if self.keys_as_values else "qkv"
        return tuple((f"{p}_proj.{of}", w) for p, w in zip(letters, self._widths, strict=True))

    @cached_property
    def _indexer(self) -> BlockIndexer | None:
        """The indexer with this attention's place."""
        return self.indexer and replace(self.indexer, layer=self.layer, source=self.source)

    @cached_property
    def o(self) -> Tensor:
        """The weight of the output projection, [hidden, heads * value_dim]."""
        width = self.shape.heads * self.shape.value_dim
        return self._matrix("o", width, (self.projections.o, self.hidden))

    @cached_property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The bias of q, k and v together, one element for each of their columns, and the bias [hidden] of the output
        projection; None in the place of a bias that the layer lacks."""
        assert not (self.qkv_bias and self.gates), "no family has biases on gated attention"
        parts = self._vector("qkv_bias", *self._projections("bias"), neutral=0.0)
        qkv = self._or_fused(parts, "bias", ())
        o = self._vector("o_bias", (f"{self.projections.o}.bias", self.hidden), neutral=0.0)
        return qkv if self.qkv_bias else None, o if self.o_bias else None

    @cached_property
    def qk_norms(self) -> tuple[Tensor, ...]:
        """The gains of the RMSNorms of q and k: [head_dim] each, or as long as all heads if these are normed together;
        (): there are no norms, or they have no weights."""
        if self.norms is None or not self.norms.weighted:
            return ()
        d, plus = self.shape.head_dim, self.norms.plus
        widths = self._widths[:2] if self.norms.of is NormedQk.ROWS else (d, d)
        names = zip(("q_norm", "k_norm"), self.norms.names, widths, strict=True)
        return tuple(
            self._vector(name, (f"{of}.weight", width), plus=plus) for name, of, width in names
        )

    @cached_property
    def sinks(self) -> Tensor | None:
        """The attention sinks [heads]: one more score of each head's softmax; None: there are none."""
        name = self.sinks_name
        return self._vector("sinks", (name, self.shape.heads)) if name else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the attention, those it has, in this order: projections, norms of q and k, biases,
        sinks, and the norms of its indexer."""
        optional = (vector for vector in (*self.biases, self.sinks) if vector is not None)
        index = self._indexer.norms if self._indexer else ()
        return (self.qkv, self.o, *self.qk_norms, *optional, *index)

    @property
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs for projections, partial results of
        attention and the positions that an indexer chooses."""
        s, index = self.shape, self.indexer.shape if self.indexer else None
        partials = ceil_to(s.heads * (s.value_dim + 2), GQA_SPLIT_PAGES) // GQA_SPLIT_PAGES
        made = replace(Scratch.of(self.tensors), partials=partials)
        if index is None:
            return made
        lists = index.heads * index.top_k  # a list for each of its heads
        return replace(made, chosen=lists, partials=max(partials, index.partials))

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: for each position, the keys and values of all kv heads and
        the index key, if any; with the operations of attention on each position."""
        s, index = self.shape, self.indexer.shape if self.indexer else None
        return LayerState(
            position_elements=s.kept + s.beside,
            position_heads=0 if index else 2 * s.kv_heads,
            ops_per_position=2 * s.heads * (s.head_dim + s.value_dim),
            window=s.window,
            chosen=index.positions if index else 0,
            index_elements=s.beside,
            index_ops=2 * index.heads * index.dim if index else 0,
        )

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the attention's output [T, hidden] of its input x [T, hidden]."""
        d = self.shape.head_dim
        qkv_bias, o_bias = self.biases
        index_widths = [width for _, width in self._indexer.projections] if self._indexer else []
        widths = (*self._widths, *index_widths, *self._gate_widths)
        q, k, v, *others = b.split(b.linear(x, self.qkv, bias=qkv_bias), *widths)
        norms_rotated = self.norms is not None and self.norms.of is NormedQk.ROTATED
        if self.norms and not norms_rotated:
            q, k = self._normed(b, q, k)
        if self.rope:
            q, k = b.rope(q, self.rope, head_width=d), b.rope(k, self.rope, head_width=d)
        if norms_rotated:
            q, k = self._normed(b, q, k)
        if self.norms and self.norms.values:
            v = b.norm(v, None, self.eps, head_width=self.shape.value_dim)
        if self.temper:
            q = b.temper(q, self.temper.beta, self.temper.every, self.temper.shift)
        if self.value_scale != 1.0:
            v = b.scale(v, self.value_scale)
        if self._indexer:
            self._indexer.forward(b, *others[: len(index_widths)])
        chosen = self._indexer is not None
        # [T, heads * value_dim]
        mixed = b.gqa(q, k, v, self.shape, layer=self.layer, sinks=self.sinks, chosen=chosen)
        if self.gates:
            mixed = b.gate(mixed, others[-1], self.gates.kind)
        return b.linear(mixed, self.o, bias=o_bias)

    def _normed(self, b: Backend, q: Value, k: Value) -> tuple[Value, Value]:
        rows = self.norms is not None and self.norms.of is NormedQk.ROWS
        run = None if rows else self.shape.head_dim
        of_q, of_k = self.qk_norms or (None, None)
        return b.norm(q, of_q, self.eps, head_width=run), b.norm(k, of_k, self.eps, head_width=run)
