"""Multi-head latent attention (DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-5, Ling 3, A.X K2)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.layers.gates import OwnGates, QueryGates
from ktcli.layers.indexer import Indexer
from ktcli.layers.stored import StoredPart, by_head
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.state import MLA_SPLIT_PAGES, LayerState, Scratch
from ktcli.ops.table.attention import MlaShape
from ktcli.ops.table.rowwise import Reads, Rope, Temper
from ktcli.ops.tensors import Band, Role, Stored, Tensor, ceil_to
from ktcli.records import dataclass


@dataclass(frozen=True)
class LatentAttention(StoredPart):
    """Attention over a cached latent (MLA). Source: DeepSeek-V2 report, section 2.1.

    kv_b is split per head into W_UK and W_UV. Decode multiplies q by W_UK ("absorbed"), so that scores
    and values are taken on the latent itself; prefill expands keys and values from it.

    Attributes:
        q_lora: width of the query latent; 0 = the query is projected directly (V2-Lite).
        rope: the rotation of the last columns of each head and of the latent; None: nothing is rotated.
        inner_eps: eps of the norms of the latents. DeepSeek's code leaves them at this, whatever the config says.
        gates: gates by another projection (Ling 3), which exclude biases, or by that of the queries (A.X K2); None:
            there are none.
        raw: whether the projection of the query latent reads it as it is, too, behind the normed one (A.X K2). The rows
            that make it are stored twice.
        o_name: checkpoint name of the last projection.
        temper: what queries are multiplied by, by their positions (Mistral 4); None: nothing.
        chosen: the most positions that a token attends to, which an indexer chooses; 0: all.
        indexer: chooses them; None: an earlier layer's does. It needs a query latent and excludes biases.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.3.self_attn".
    """

    hidden: int
    q_lora: int
    shape: MlaShape
    rope: Rope | None
    bias: bool
    chosen: int = 0
    indexer: Indexer | None = None
    inner_eps: float = 1e-6
    gates: OwnGates | QueryGates | None = None
    raw: bool = False
    o_name: str = "o_proj"
    temper: Temper | None = None
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
        """The indexer with this attention's place."""
        source = f"{self.source}.indexer"
        return self.indexer and replace(self.indexer, layer=self.layer, source=source)

    @property
    def _a_pieces(self) -> tuple[tuple[str, int], ...]:
        """The names and rows of the first projection. The index key stands before the latent, so that blocks of 128
        rows (FP8) stay whole; gates come last."""
        q = ("q_a_proj", self.q_lora) if self.q_lora else ("q_proj", self._q_width)
        key = (("indexer.wk", self.indexer.shape.dim),) if self.indexer else ()
        own = isinstance(self.gates, OwnGates) and self.gates.source
        gates = ((own, self._gate_width),) if own else ()
        return (
            *([q] * (2 if self.raw else 1)),
            *key,
            ("kv_a_proj_with_mqa", self._latent_width),
            *gates,
        )

    @property
    def _gate_width(self) -> int:
        return self.gates.width(self.shape.heads, self.shape.v) if self.gates else 0

    @cached_property
    def qkv_a(self) -> Tensor:
        """The weight [rows, hidden] of the stacked projection of the input, in this order, to the query latent (twice,
        if `raw`) or, without one, the queries; the index key, if there is an indexer; the KV latent; and the gates, if
        they have a projection of their own (`OwnGates`)."""
        return self._matrix("qkv_a", self.hidden, *self._a_pieces)

    @cached_property
    def qkv_a_bias(self) -> Tensor | None:
        """The bias of `qkv_a`, one element for each of its rows; None: there is none."""
        if not self.bias:
            return None
        assert self.q_lora, "the reference gives a direct q projection no bias"
        own = isinstance(self.gates, OwnGates)
        assert not own, "no family has biases on latent attention with a projection of gates"
        pieces = ((f"{name}.bias", width) for name, width in self._a_pieces)
        return self._vector("qkv_a_bias", *pieces, neutral=0.0)

    @cached_property
    def q_a_norm(self) -> Tensor:
        """The gain [q_lora] of the RMSNorm of the query latent."""
        return self._vector("q_a_norm", ("q_a_layernorm.weight", self.q_lora))

    @cached_property
    def q_b(self) -> Tensor:
        """The weight [rows, q_lora] of the projection of the normed query latent to the queries of all heads, then to
        the index queries or gates, if any. If `raw`, [rows, 2 * q_lora]: it reads the latent both normed and as it is.
        """
        index = (("indexer.wq_b", self.indexer.width),) if self.indexer and not self.raw else ()
        gated = isinstance(self.gates, QueryGates)
        width = self._q_width + (self._gate_width if gated else 0)
        made = self._matrix(
            "q_b", self.q_lora * (2 if self.raw else 1), ("q_b_proj", width), *index
        )
        return replace(made, sources=(self._gates_last(*made.sources[0]),)) if gated else made

    def _gates_last(self, both: Stored, *others: Stored) -> tuple[Stored, ...]:
        """Returns the queries of all heads, the other pieces, then the gates of all heads, of a projection in which
        each head has its query and then its gates."""
        each = self._q_width // self.shape.heads, self._gate_width // self.shape.heads
        queries, gates = by_head(both, *each)
        return (*queries, *others, *gates)

    @cached_property
    def index_q(self) -> Tensor | None:
        """If `raw`, the weight [index heads * dim, q_lora] of the projection of the normed query latent to the index
        queries. None: not `raw`, so `q_b` contains it, or there is no indexer."""
        if not (self.indexer and self.raw):
            return None
        return self._matrix("index_q", self.q_lora, ("indexer.wq_b", self.indexer.width))

    @cached_property
    def kv_a_norm(self) -> Tensor:
        """The gain [lora] of the RMSNorm of the KV latent."""
        return self._vector("kv_a_norm", ("kv_a_layernorm.weight", self.shape.lora))

    @cached_property
    def kv_b(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three weights into which the checkpoint's kv_b is split, each with one matrix per head: uk_in [lora,
        nope] (keys, transposed), uk_out [nope, lora] (keys) and uv [v, lora] (values).

        GGUF files have k_b [heads, lora, nope] and v_b [heads, v, lora] instead.
        """
        s, each = self.shape, self.shape.nope + self.shape.v
        shape = (s.heads * each, s.lora)

        def part(name: str, n: int, k: int, band: Band, transposed: bool, split: Stored) -> Tensor:
            piece = Stored(f"{self.source}.kv_b_proj.weight", shape, False, band, transposed)
            where, sources = self._named(name), ((piece,), (split,))
            made = Tensor(where, n, k, Role.KEPT, sources, s.heads, part=ModelPart.LATENT)
            return replace(made, layer=self.layer)

        keys, values = Band(each, 0, s.nope), Band(each, s.nope, s.v)
        k_b = Stored(f"{self.source}.k_b_proj.weight", (s.heads, s.lora, s.nope), matrix=True)
        v_b = Stored(f"{self.source}.v_b_proj.weight", (s.heads, s.v, s.lora), matrix=True)
        expanding = part("uk_out", s.nope, s.lora, keys, False, replace(k_b, transposed=True))
        return (
            part("uk_in", s.lora, s.nope, keys, True, k_b),
            replace(expanding, access=Access.EXPANSION),
            part("uv", s.v, s.lora, values, False, v_b),
        )

    @cached_property
    def o(self) -> Tensor:
        """The weight of the output projection, [hidden, heads * v]."""
        return self._matrix("o", self.shape.heads * self.shape.v, (self.o_name, self.hidden))

    @cached_property
    def o_bias(self) -> Tensor | None:
        """The bias [hidden] of the output projection; None: there is none."""
        if not self.bias:
            return None
        return self._vector("o_bias", (f"{self.o_name}.bias", self.hidden), neutral=0.0)

    @property
    def follows(self) -> bool:
        """Whether the layer attends to positions that an earlier layer's indexer has chosen, having no indexer
        itself."""
        return self.chosen > 0 and self.indexer is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the attention, then those of its indexer, if any."""
        query = (self.q_a_norm, self.q_b) if self.q_lora else ()
        optional = (self.index_q, self.qkv_a_bias, self.o_bias)
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
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs: for projections, the queries and results
        of all heads in the absorbed form, the positions that an indexer chooses, and partial results of attention."""
        s = self.shape
        heads = s.heads * (self.state.position_elements + 3 * s.lora // 2)
        chosen = self.indexer.shape.top_k if self.indexer else 0
        partials = ceil_to(s.heads * (s.lora + 2), MLA_SPLIT_PAGES) // MLA_SPLIT_PAGES
        if self.indexer:
            partials = max(partials, self.indexer.shape.partials)
        made = Scratch.of(self.tensors)
        return replace(made, heads=heads, expanded=True, chosen=chosen, partials=partials)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: for each position, the KV latent and the index key, if any,
        and the open window if index keys are pooled; with the operations of attention on each position in the absorbed
        and the expanded form."""
        s = self.shape
        index = self.indexer.shape if self.indexer else None
        pool = self.indexer.pool if self.indexer else None
        return LayerState(
            position_elements=self._latent_width + self.shape.beside,
            position_heads=0 if self.chosen else s.cached_heads,
            sequence_elements=pool.state_elements if pool else 0,
            ops_per_position=2 * s.heads * (self._latent_width + s.lora),
            expanded_ops=2 * s.heads * (s.nope + s.rope + s.v),
            expansion_ops=2 * s.heads * s.lora * (s.nope + s.v),
            chosen=self.chosen,
            index_elements=self.shape.beside,
            index_ops=2 * index.heads * index.dim // index.every if index else 0,
        )

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the attention's output [T, hidden] of its input x [T, hidden]."""
        s = self.shape
        a = b.linear(x, self.qkv_a, bias=self.qkv_a_bias)
        doubled = 2 * self.q_lora if self.raw else self._a_pieces[0][1]
        after = (width for _, width in self._a_pieces[2 if self.raw else 1 :])
        q, *others = b.split(a, doubled, *after)
        latent = others[1 if self._indexer else 0]
        if self.q_lora:
            q, index_q, gates = self._queries(b, q)
            if self._indexer:
                self._indexer.forward(b, x, index_q, others[0])
            others += [gates] if gates is not None else []
        latent = b.norm(latent, self.kv_a_norm, self.inner_eps, columns=s.lora)
        if self.temper:  # before the rotation, which attention on a device takes along
            q = b.temper(q, self.temper.beta, self.temper.every, self.temper.shift)
        if self.rope:
            q = b.rope(q, self.rope, head_width=s.nope + s.rope, first=s.nope)
            latent = b.rope(latent, self.rope, head_width=self._latent_width, first=s.lora)
        mixed = b.mla(q, latent, *self.kv_b, s, layer=self.layer, chosen=self.chosen > 0)
        if self.gates:
            mixed = b.gate(mixed, others[-1], self.gates.kind)
        return b.linear(mixed, self.o, bias=self.o_bias)  # mixed [T, heads * v]

    def _queries(self, b: Backend, latent: Value) -> tuple[Value, Value | None, Value | None]:
        """Returns queries, index queries and gates of the query latent; None for what there is not."""
        index_q = None
        if self.raw:
            latent = b.norm(latent, self.q_a_norm, self.inner_eps, columns=self.q_lora)
            if self.index_q:
                index_q = b.linear(b.split(latent, self.q_lora, self.q_lora)[0], self.index_q)
            # Wide: the halves have different magnitudes, of which one scale for 8-bit activations favours the larger.
            q = b.linear(latent, self.q_b, reads=Reads.WIDE)
        else:
            q = b.linear(b.norm(latent, self.q_a_norm, self.inner_eps), self.q_b)
        index = self._indexer.width if self._indexer and not self.raw else 0
        gates = self._gate_width if isinstance(self.gates, QueryGates) else 0
        widths = [width for width in (self._q_width, index, gates) if width]
        q, *others = b.split(q, *widths) if len(widths) > 1 else (q,)
        if index:
            index_q = others.pop(0)
        return q, index_q, others[0] if gates else None
