"""Lightning indexers: small heads that score every cached position, so that a token attends to only a few of them.

In GLM-5.3 they score windows of positions, whose keys are pooled by a learned weight of each. Sources:
DeepSeek-V3.2 report, section 2.1; transformers 5.23 (glm5_next). Published engines rotate queries and keys by a
Hadamard matrix and round them to FP8; the rotation changes no product and the rounding is only for speed, so neither is
done here, as in transformers 5.23.
"""

from __future__ import annotations

from functools import cached_property

from ktcli.layers.stored import StoredPart
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.table.attention import ChooseShape
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.tensors import Stored, Tensor, kept_whole, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class Indexer(StoredPart):
    """A lightning indexer's own weights and its choice of positions; the projections of its keys and queries lie in
    those of the attention.

    Attributes:
        rope: the rotation of the first columns of each head; None: nothing is rotated.
        pool: makes one key of a window of them; None: each position has its own.
        layer: number of the decoder layer.
        source: checkpoint prefix, e.g. "model.layers.3.self_attn.indexer".
    """

    hidden: int
    shape: ChooseShape
    rope: Rope | None
    pool: PoolShape | None = None
    layer: int = 0
    source: str = ""

    # The eps of the norm of the keys, whatever the config says, as in the reference.
    EPS = 1e-6

    @property
    def width(self) -> int:
        """The number of columns of the index queries of all heads: heads * dim."""
        return self.shape.heads * self.shape.dim

    @cached_property
    def key_norm(self) -> tuple[Tensor, Tensor]:
        """The gain and the bias, [dim] each, of the LayerNorm of the index keys."""
        dim = self.shape.dim
        bias = self._vector("index_norm_bias", ("k_norm.bias", dim), neutral=0.0)
        return self._vector("index_norm_weight", ("k_norm.weight", dim)), bias

    @cached_property
    def weights(self) -> Tensor:
        """The weight of the projection of the input to one weight for each index head, [heads, hidden], followed, if
        keys are pooled, by that to their pooling scores, [dim, hidden]; stored unquantized, like a router."""
        sizes = {"weights_proj.weight": self.shape.heads}
        if self.pool:
            sizes["index_kpool_compress_gate"] = self.shape.dim
        pieces = (Stored(f"{self.source}.{of}", (n, self.hidden)) for of, n in sizes.items())
        name = self._named("index_weights")
        return kept_whole(name, *pieces, layer=self.layer, part=ModelPart.INDEXER)

    @cached_property
    def pool_bias(self) -> Tensor | None:
        """The bias [every, dim] of the scores with which the index keys of a window of `every` positions are pooled;
        None: keys are not pooled."""
        if self.pool is None:
            return None
        shape = self.pool.every, self.pool.dim
        stored = Stored(f"{self.source}.index_kpool_compress_ape", shape)
        return vector(self._named("index_pool_bias"), stored, layer=self.layer, neutral=0.0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The indexer's own stored tensors: `weights`, gain and bias of the keys' norm, and the pooling bias, if any;
        the projections to index queries and keys belong to the attention."""
        bias = (self.pool_bias,) if self.pool_bias else ()
        return (self.weights, *self.key_norm, *bias)

    def forward(self, b: Backend, x: Value, q: Value, key: Value) -> None:
        """Chooses the positions that each token attends to; the backend hands the choice to the attention of this layer
        and of those up to the next layer with an indexer.

        Args:
            x: the attention's input [T, hidden].
            q: the projected queries [T, heads * dim].
            key: the projected key [T, dim].
        """
        weight = b.linear(x, self.weights, reads=Reads.F32)
        key = b.layer_norm(key, *self.key_norm, self.EPS)
        if self.rope:
            q, key = (b.rope(each, self.rope, head_width=self.shape.dim) for each in (q, key))
        if self.pool and self.pool_bias:
            weight, score = b.split(weight, self.shape.heads, self.shape.dim)
            key = b.pooling(key, score, self.pool_bias, self.pool, layer=self.layer, first=0)
        b.choose(q, key, weight, self.shape, layer=self.layer)


@dataclass(frozen=True)
class BlockIndexer(StoredPart):
    """The indexer of MiniMax-M3: one head for each kv head chooses blocks of positions. Its projections lie with those
    of the attention.

    Attributes:
        rope: the rotation of the first columns of each head.
        norm_plus: the number added to the weights of the norms.
        source: checkpoint prefix of the attention.
    """

    shape: ChooseShape
    rope: Rope
    eps: float
    norm_plus: float
    layer: int = 0
    source: str = ""

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """Two pairs (checkpoint name below the attention, number of rows): of the projection to index queries and of
        that to the index key."""
        s = self.shape
        return ("index_q_proj.weight", s.heads * s.dim), ("index_k_proj.weight", s.dim)

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """The gains, [dim] each, of two RMSNorms: of the index queries, one for all heads, and of the index key."""
        return self._norm("q"), self._norm("k")

    def _norm(self, of: str) -> Tensor:
        piece = f"index_{of}_norm.weight", self.shape.dim
        return self._vector(f"index_{of}_norm", piece, plus=self.norm_plus)

    def forward(self, b: Backend, q: Value, key: Value) -> None:
        """Chooses the blocks of positions that each token attends to; the backend hands the choice to the attention of
        this layer.

        Args:
            q: the projected index queries [T, heads * dim].
            key: the projected index key [T, dim].
        """
        dim = self.shape.dim
        q, key = (
            b.rope(b.norm(x, gain, self.eps, head_width=dim), self.rope, head_width=dim)
            for x, gain in zip((q, key), self.norms, strict=True)
        )
        b.choose(q, key, None, self.shape, layer=self.layer)
