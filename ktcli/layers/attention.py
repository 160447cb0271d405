"""The two attentions: grouped-query (Qwen, Llama …) and multi-head latent (DeepSeek).

Projections that read the same input are stored as one matrix: one quantisation of the input and one
barrier instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ktcli.layers.backend import Backend, Gate, GqaShape, MlaShape, Rope, Value
from ktcli.layers.compressed import CompressedAttention
from ktcli.layers.indexer import BlockIndexer, Indexer
from ktcli.layers.recurrent import GatedDeltaNet, KimiDelta
from ktcli.layers.state import LayerState
from ktcli.layers.tensors import Band, Cut, Role, Stored, Tensor, whole


class QkNorm(Enum):
    """Where q and k are normalised (RMSNorm)."""

    NONE = "none"
    HEADS = "heads"  # each head, before the rotation (Qwen3)
    TURNED = "turned"  # each head, after the rotation (Hunyuan)
    ROWS = "rows"  # all heads together, before the rotation (MiniMax-M2)


@dataclass(frozen=True, slots=True)
class OwnGates:
    """Gates by a projection of their own, on what the heads attend to.

    Attributes:
        source: checkpoint name of the projection, below the attention.
        kind: what of them multiplies.
        per_column: each column of a head has one; else each head.
    """

    source: str
    kind: Gate = Gate.SIGMOID
    per_column: bool = False


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose query heads share key/value heads.

    Attributes:
        rope: may rotate only the first columns of each head.
        rotates: it is used; K-EXAONE's layers without a window have no positions.
        qkv_bias, o_bias: on q, k and v; on o.
        sinks_name: of what the checkpoint gives each head's softmax as one more score (gpt-oss); "": nothing.
        value_scale: what its values are multiplied with (MiMo-V2).
        norms: checkpoint names of the norms of q and k.
        norm_plus: added to their weights.
        gated: each head of the checkpoint's q projection has its query and then its gate, by the sigmoid of
            which what the head attends to is multiplied (Qwen3-Next).
        own_gates: gates by another projection (Step-3.5); None: there are none.
        indexer: chooses the blocks of positions that a token attends to, for each kv head; None: it attends to
            all. Its projections lie behind those of q, k and v.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.3.self_attn".
    """

    hidden: int
    shape: GqaShape
    rope: Rope
    eps: float
    qk_norm: QkNorm = QkNorm.NONE
    qkv_bias: bool = False
    o_bias: bool = False
    sinks_name: str = ""
    value_scale: float = 1.0
    norms: tuple[str, str] = ("q_norm", "k_norm")
    norm_plus: float = 0.0
    gated: bool = False
    own_gates: OwnGates | None = None
    indexer: BlockIndexer | None = None
    rotates: bool = True
    layer: int = 0
    source: str = ""

    def within(self, window: int) -> GroupedQueryAttention:
        """The same, whose tokens see so many positions; 0: all."""
        return replace(self, shape=replace(self.shape, window=window))

    @property
    def _widths(self) -> tuple[int, int, int]:
        s = self.shape
        return s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.value_dim

    @property
    def _is_gated(self) -> bool:
        return self.gated or self.own_gates is not None

    @property
    def _own_width(self) -> int:
        """Columns of gates by a projection of their own."""
        each = self.shape.value_dim if self.own_gates and self.own_gates.per_column else 1
        return self.shape.heads * each

    @cached_property
    def qkv(self) -> Tensor:
        """The rows of q, k and v, then of the gates."""
        pieces = tuple((f"{p}_proj.weight", w) for p, w in zip("qkv", self._widths, strict=True))
        index = self.indexer.projections if self.indexer else ()
        own = self.own_gates
        gates_of = ((f"{own.source}.weight", self._own_width),) if own else ()
        made = _matrix(self, "qkv", (*pieces, *index, *gates_of), self.hidden)
        if not self.gated:
            return made
        (first, *others), width = made.sources[0], self._widths[0]
        queries, gates = _head_halves(replace(first, shape=(2 * width, self.hidden)), self.shape)
        return replace(made, n=made.n + width, sources=((*queries, *others, *gates),))

    @cached_property
    def _indexer(self) -> BlockIndexer | None:
        """The indexer in its place."""
        return self.indexer and replace(self.indexer, layer=self.layer, source=self.source)

    @cached_property
    def o(self) -> Tensor:
        width = self.shape.heads * self.shape.value_dim
        return _matrix(self, "o", (("o_proj.weight", self.hidden),), width)

    @cached_property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Of q, k, v, and of o."""
        pieces = tuple((f"{p}_proj.bias", w) for p, w in zip("qkv", self._widths, strict=True))
        qkv = _vector(self, "qkv_bias", pieces) if self.qkv_bias else None
        assert not (qkv and self._is_gated), "no family has biases on gated attention"
        o = _vector(self, "o_bias", (("o_proj.bias", self.hidden),)) if self.o_bias else None
        return qkv, o

    @cached_property
    def qk_norms(self) -> tuple[Tensor, ...]:
        if self.qk_norm is QkNorm.NONE:
            return ()
        d = self.shape.head_dim
        widths = self._widths[:2] if self.qk_norm is QkNorm.ROWS else (d, d)
        names = zip(("q_norm", "k_norm"), self.norms, widths, strict=True)
        return tuple(
            _vector(self, name, ((f"{of}.weight", width),), self.norm_plus)
            for name, of, width in names
        )

    @cached_property
    def sinks(self) -> Tensor | None:
        name = self.sinks_name
        return _vector(self, "sinks", ((name, self.shape.heads),)) if name else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        optional = (vector for vector in (*self.biases, self.sinks) if vector is not None)
        index = self._indexer.norms if self._indexer else ()
        return (self.qkv, self.o, *self.qk_norms, *optional, *index)

    @property
    def state(self) -> LayerState:
        """Keys and values, and the index key behind them; scores and weighted values of every head."""
        s, index = self.shape, self.indexer.shape if self.indexer else None
        return LayerState(
            position_elements=s.kept + s.beside,
            ops_per_position=2 * s.heads * (s.head_dim + s.value_dim),
            window=s.window,
            chosen=index.positions if index else 0,
            index_elements=s.beside,
            index_ops=2 * index.heads * index.dim if index else 0,
        )

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        d = self.shape.head_dim
        qkv_bias, o_bias = self.biases
        index_widths = [width for _, width in self._indexer.projections] if self._indexer else []
        gates = [self._own_width] if self.own_gates else self._widths[: self.gated]
        widths = (*self._widths, *index_widths, *gates)
        q, k, v, *others = b.split(b.linear(x, self.qkv, bias=qkv_bias), *widths)
        if self.qk_norm is not QkNorm.TURNED:
            q, k = self._normed(b, q, k)
        if self.rotates:
            q, k = b.rope(q, self.rope, head_width=d), b.rope(k, self.rope, head_width=d)
        if self.qk_norm is QkNorm.TURNED:
            q, k = self._normed(b, q, k)
        if self.value_scale != 1.0:
            v = b.scale(v, self.value_scale)
        if self._indexer:
            self._indexer.forward(b, *others[: len(index_widths)])
        chosen = self._indexer is not None
        # [T, heads * value_dim]
        mixed = b.gqa(q, k, v, self.shape, layer=self.layer, sinks=self.sinks, chosen=chosen)
        if self._is_gated:
            kind = self.own_gates.kind if self.own_gates else Gate.SIGMOID
            mixed = b.gate(mixed, others[-1], kind)
        return b.linear(mixed, self.o, bias=o_bias)

    def _normed(self, b: Backend, q: Value, k: Value) -> tuple[Value, Value]:
        if not self.qk_norms:
            return q, k
        run = None if self.qk_norm is QkNorm.ROWS else self.shape.head_dim
        q = b.norm(q, self.qk_norms[0], self.eps, head_width=run)
        return q, b.norm(k, self.qk_norms[1], self.eps, head_width=run)


@dataclass(frozen=True)
class LatentAttention:
    """Attention over a cached latent (MLA). Source: DeepSeek-V2 report, section 2.1.

    kv_b is split per head into W_UK and W_UV. Decode multiplies q by W_UK ("absorbed"), so that scores
    and values are taken on the latent itself; prefill expands keys and values from it.

    Attributes:
        q_lora: width of the query latent; 0 = the query is projected directly (V2-Lite).
        rope: of the last columns of each head and of the latent; None: there are none.
        inner_eps: of the norms of the latents. DeepSeek's code leaves them at this, whatever the config says.
        chosen: a token attends to at most so many positions, which an indexer chooses; 0: to all.
        indexer: what chooses them; None: that of an earlier layer did. Needs a query latent, no bias.
        layer, source: as above.
    """

    hidden: int
    q_lora: int
    shape: MlaShape
    rope: Rope | None
    bias: bool
    chosen: int = 0
    indexer: Indexer | None = None
    inner_eps: float = 1e-6
    layer: int = 0
    source: str = ""

    @property
    def _q_width(self) -> int:
        return self.shape.heads * (self.shape.nope + self.shape.rope)

    @property
    def _latent_width(self) -> int:
        return self.shape.lora + self.shape.rope

    @cached_property
    def _indexer(self) -> Indexer | None:
        """The indexer in its place."""
        source = f"{self.source}.indexer"
        return self.indexer and replace(self.indexer, layer=self.layer, source=source)

    @property
    def _a_pieces(self) -> tuple[tuple[str, int], ...]:
        """The index key stands before the latent, so that blocks of 128 rows (FP8) stay whole."""
        q = ("q_a_proj", self.q_lora) if self.q_lora else ("q_proj", self._q_width)
        key = (("indexer.wk", self.indexer.shape.dim),) if self.indexer else ()
        return q, *key, ("kv_a_proj_with_mqa", self._latent_width)

    @cached_property
    def qkv_a(self) -> Tensor:
        pieces = tuple((f"{name}.weight", width) for name, width in self._a_pieces)
        return _matrix(self, "qkv_a", pieces, self.hidden)

    @cached_property
    def qkv_a_bias(self) -> Tensor | None:
        """Only with a query latent: the reference gives a direct q projection no bias."""
        if not (self.bias and self.q_lora):
            return None
        return _vector(
            self, "qkv_a_bias", tuple((f"{name}.bias", width) for name, width in self._a_pieces)
        )

    @cached_property
    def q_a_norm(self) -> Tensor:
        return _vector(self, "q_a_norm", (("q_a_layernorm.weight", self.q_lora),))

    @cached_property
    def q_b(self) -> Tensor:
        index = (("indexer.wq_b.weight", self.indexer.width),) if self.indexer else ()
        pieces = (("q_b_proj.weight", self._q_width), *index)
        return _matrix(self, "q_b", pieces, self.q_lora)

    @cached_property
    def kv_a_norm(self) -> Tensor:
        return _vector(self, "kv_a_norm", (("kv_a_layernorm.weight", self.shape.lora),))

    @cached_property
    def kv_b(self) -> tuple[Tensor, Tensor, Tensor]:
        """(uk_in [lora, nope], uk_out [nope, lora], uv [v, lora]), one matrix per head.

        GGUF files have it in two: k_b [heads, lora, nope] and v_b [heads, v, lora].
        """
        s, each = self.shape, self.shape.nope + self.shape.v
        shape = (s.heads * each, s.lora)

        def part(name: str, n: int, k: int, band: Band, turned: bool, split: Stored) -> Tensor:
            piece = Stored(f"{self.source}.kv_b_proj.weight", shape, False, band, turned)
            where, sources = f"layers.{self.layer}.attn.{name}", ((piece,), (split,))
            return Tensor(where, n, k, Role.KEPT, sources, count=s.heads, layer=self.layer)

        keys, values = Band(each, 0, s.nope), Band(each, s.nope, s.v)
        k_b = Stored(f"{self.source}.k_b_proj.weight", (s.heads, s.lora, s.nope), matrix=True)
        v_b = Stored(f"{self.source}.v_b_proj.weight", (s.heads, s.v, s.lora), matrix=True)
        return (
            part("uk_in", s.lora, s.nope, keys, True, k_b),
            part("uk_out", s.nope, s.lora, keys, False, replace(k_b, transposed=True)),
            part("uv", s.v, s.lora, values, False, v_b),
        )

    @cached_property
    def o(self) -> Tensor:
        return _matrix(
            self, "o", (("o_proj.weight", self.hidden),), self.shape.heads * self.shape.v
        )

    @cached_property
    def o_bias(self) -> Tensor | None:
        return _vector(self, "o_bias", (("o_proj.bias", self.hidden),)) if self.bias else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        query = (self.q_a_norm, self.q_b) if self.q_lora else ()
        optional = (self.qkv_a_bias, self.o_bias)
        return (
            self.qkv_a,
            *query,
            self.kv_a_norm,
            *self.kv_b,
            self.o,
            *(t for t in optional if t is not None),
            *(self._indexer.tensors if self._indexer else ()),
        )

    @property
    def state(self) -> LayerState:
        """The latent, and the index key behind it; scores and weighted latents of every head, absorbed. Of a
        window of keys that is open, what they come to so far."""
        index = self.indexer.shape if self.indexer else None
        pool = self.indexer.pool if self.indexer else None
        return LayerState(
            position_elements=self._latent_width + self.shape.beside,
            sequence_elements=pool.state_elements if pool else 0,
            ops_per_position=2 * self.shape.heads * (self._latent_width + self.shape.lora),
            chosen=self.chosen,
            index_elements=self.shape.beside,
            index_ops=2 * index.heads * index.dim // index.every if index else 0,
        )

    def forward(self, b: Backend, x: Value) -> Value:
        """x [T, hidden] -> [T, hidden]."""
        s = self.shape
        a = b.linear(x, self.qkv_a, bias=self.qkv_a_bias)
        q, *key, latent = b.split(a, *(width for _, width in self._a_pieces))
        if self.q_lora:
            q = b.linear(b.norm(q, self.q_a_norm, self.inner_eps), self.q_b)
        if self._indexer:
            q, index_q = b.split(q, self._q_width, self._indexer.width)
            self._indexer.forward(b, x, index_q, key[0])
        latent = b.norm(latent, self.kv_a_norm, self.inner_eps, columns=s.lora)
        if self.rope:
            q = b.rope(q, self.rope, head_width=s.nope + s.rope, first=s.nope)
            latent = b.rope(latent, self.rope, head_width=self._latent_width, first=s.lora)
        mixed = b.mla(q, latent, self.kv_b, s, layer=self.layer, chosen=self.chosen > 0)
        return b.linear(mixed, self.o, bias=self.o_bias)  # mixed [T, heads * v]


Attention = (
    GroupedQueryAttention | LatentAttention | GatedDeltaNet | KimiDelta | CompressedAttention
)


def _matrix(part: Attention, name: str, pieces: tuple[tuple[str, int], ...], k: int) -> Tensor:
    """Rows of the named projections, one behind the other."""
    return Tensor(
        f"layers.{part.layer}.attn.{name}",
        sum(rows for _, rows in pieces),
        k,
        Role.DENSE,
        whole(*((f"{part.source}.{source}", (rows, k)) for source, rows in pieces)),
        layer=part.layer,
        cut=Cut.ROWS,
    )


def _head_halves(stored: Stored, shape: GqaShape) -> tuple[tuple[Stored, ...], tuple[Stored, ...]]:
    """Of a projection with 2 * head_dim rows for each head, every head's first half, and every second."""
    d = shape.head_dim
    first, second = (
        tuple(replace(stored, first=(2 * head + half) * d, count=d) for head in range(shape.heads))
        for half in (0, 1)
    )
    return first, second


def _vector(
    part: Attention, name: str, pieces: tuple[tuple[str, int], ...], plus: float = 0.0
) -> Tensor:
    return Tensor(
        f"layers.{part.layer}.attn.{name}",
        1,
        sum(length for _, length in pieces),
        Role.VECTOR,
        (tuple(Stored(f"{part.source}.{of}", (n,), plus=plus) for of, n in pieces),),
        layer=part.layer,
    )
