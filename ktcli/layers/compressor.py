"""Pooling of windows of positions into one row each, and small heads that choose among these (DeepSeek-V4).

Source: DeepSeek-V4 report, section 2.3; transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import ModelPart
from ktcli.ops.table.attention import ChooseShape
from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.table.rowwise import Reads, Rope
from ktcli.ops.tensors import Stored, Tensor, kept_whole, matrix, vector
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
        """The projection of the rows that are pooled, then of their scores; published in bf16 where all else is in
        8 bits, and kept so."""
        shape = (self.shape.columns, self.hidden)
        pieces = (Stored(f"{self.source}.{of}.weight", shape) for of in ("wkv", "wgate"))
        name = f"{self.name}.projection"
        return kept_whole(name, *pieces, layer=self.layer, part=ModelPart.POOLING)

    @cached_property
    def bias(self) -> Tensor:
        """The bias [every, columns] of the scores, one row for each position of a window."""
        shape = (self.shape.every, self.shape.columns)
        return self._vector("bias", Stored(f"{self.source}.ape", shape), neutral=0.0)

    @cached_property
    def norm(self) -> Tensor:
        """The gain [dim] of the norm of the pooled rows."""
        return self._vector("norm", Stored(f"{self.source}.norm.weight", (self.shape.dim,)))

    def _vector(self, name: str, piece: Stored, neutral: float = 1.0) -> Tensor:
        return vector(f"{self.name}.{name}", piece, layer=self.layer, neutral=neutral)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the compressor: projection, bias and gain of the norm."""
        return self.projection, self.bias, self.norm

    def forward(self, b: Backend, x: Value, first: int) -> Value:
        """Returns the pooled rows [T, dim] of x [T, hidden], of which only rows that complete a window count; its
        state begins at element `first` of the layer's."""
        s, dim = self.shape, self.rope.dim
        rows, scores = b.split(b.linear(x, self.projection), s.columns, s.columns)
        pooled = b.pooling(rows, scores, self.bias, s, layer=self.layer, first=first)
        turn = replace(self.rope, shift=1 - s.every)
        return b.rope(
            b.norm(pooled, self.norm, self.eps), turn, head_width=s.dim, first=s.dim - dim
        )


@dataclass(frozen=True)
class WindowIndexer:
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
        """The compressor that makes the index keys, with the names that it has in this part."""
        name = f"layers.{self.layer}.attn.index_pool"
        source = f"{self.source}.compressor"
        return replace(self.compressor, layer=self.layer, name=name, source=source)

    @cached_property
    def queries(self) -> Tensor:
        """The projection [heads * dim, q_lora] of the query latent to the index queries."""
        shape = (self.shape.heads * self.shape.dim, self.q_lora)
        stored = Stored(f"{self.source}.wq_b.weight", shape)
        name = f"layers.{self.layer}.attn.index_q"
        return matrix(name, stored, layer=self.layer, part=ModelPart.ATTENTION)

    @cached_property
    def weights(self) -> Tensor:
        """The projection [heads, hidden] of the heads' weights: it decides like a router, and is kept like one."""
        stored = Stored(f"{self.source}.weights_proj.weight", (self.shape.heads, self.hidden))
        name = f"layers.{self.layer}.attn.index_weights"
        return kept_whole(name, stored, layer=self.layer, part=ModelPart.INDEXER)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the indexer, then those of the compressor that makes its keys."""
        return self.queries, self.weights, *self.keys.tensors

    def forward(self, b: Backend, x: Value, latent: Value, first: int) -> None:
        """Chooses the windows that each row attends to, from x [T, hidden] and the query latent [T, q_lora]; the
        state of its keys begins at element `first` of the layer's."""
        s, rope = self.shape, self.keys.rope
        key = self.keys.forward(b, x, first)
        q = b.rope(b.linear(latent, self.queries), rope, head_width=s.dim, first=s.dim - rope.dim)
        b.choose(q, key, b.linear(x, self.weights, reads=Reads.F32), s, layer=self.layer)
