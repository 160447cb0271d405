"""The decoder that every family shares: embedding, layers of attention and MLP, norm, head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.layers.attention import Attention
from ktcli.layers.backend import Backend, Reads, Value
from ktcli.layers.mlp import Mlp
from ktcli.layers.tensors import Cut, Role, Stored, Tensor, whole


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that a model multiplies with: embedded rows, what attention and MLP add, logits (Granite)."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
        added: what attention and MLP give is multiplied with.
        source: checkpoint prefix, e.g. "model.layers.3".
        norm_plus: added to the weights of its norms.
    """

    layer: int
    source: str
    hidden: int
    eps: float
    attention: Attention
    mlp: Mlp
    norm_plus: float = 0.0
    added: float = 1.0

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        return (
            self._norm("attn_norm", "input_layernorm"),
            self._norm("mlp_norm", "post_attention_layernorm"),
        )

    def _norm(self, name: str, source: str) -> Tensor:
        return Tensor(
            f"layers.{self.layer}.{name}",
            1,
            self.hidden,
            Role.VECTOR,
            _norm_source(self.source, source, self.hidden, self.norm_plus),
            layer=self.layer,
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.mlp.tensors, *self.attention.tensors, *self.norms)

    def forward(self, b: Backend, x: Value) -> Value:
        attended = self.attention.forward(b, b.norm(x, self.norms[0], self.eps))
        x = b.add(x, scaled(b, attended, self.added))
        mixed = self.mlp.forward(b, b.norm(x, self.norms[1], self.eps))
        return b.add(x, scaled(b, mixed, self.added))


@dataclass(frozen=True)
class Decoder:
    """The whole stack.

    Attributes:
        tied: the head is the embedding.
        body: checkpoint prefix of embedding and norm, e.g. "model".
        head_source: checkpoint prefix of the head.
        norm_plus: added to the weight of the last norm.
        multipliers: those of the layers are in the layers.
    """

    hidden: int
    vocab: int
    eps: float
    layers: tuple[DecoderLayer, ...]
    tied: bool = False
    body: str = "model"
    head_source: str = "lm_head"
    norm_plus: float = 0.0
    multipliers: Multipliers = NO_MULTIPLIERS

    @cached_property
    def embedding(self) -> Tensor:
        return self._outer("embed", Role.TABLE, Cut.NONE, f"{self.body}.embed_tokens")

    @cached_property
    def head(self) -> Tensor:
        source = f"{self.body}.embed_tokens" if self.tied else self.head_source
        return replace(self._outer("lm_head", Role.DENSE, Cut.ROWS, source), gain=self.norm)

    @cached_property
    def norm(self) -> Tensor:
        source = _norm_source(self.body, "norm", self.hidden, self.norm_plus)
        return Tensor("norm", 1, self.hidden, Role.VECTOR, source)

    def _outer(self, name: str, role: Role, cut: Cut, source: str) -> Tensor:
        shape = (self.vocab, self.hidden)
        return Tensor(name, *shape, role, whole((f"{source}.weight", shape)), cut=cut)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        inner = tuple(tensor for layer in self.layers for tensor in layer.tensors)
        return (self.embedding, *inner, self.norm, self.head)

    def forward(self, b: Backend) -> Value:
        """ids of the step in, logits [outputs, vocab] out."""
        x = scaled(b, b.embed(self.embedding), self.multipliers.embedding)  # [T, hidden]
        for layer in self.layers:
            x = layer.forward(b, x)
        # Wide: one column of a trained head may be far larger than the others, and 8-bit activations then
        # cost more here than in all layers together (kt-mini: 0.0009 of 0.0012 nats per token).
        x = scaled(b, b.norm(b.select(x), self.norm, self.eps), self.multipliers.logits)
        return b.linear(x, self.head, reads=Reads.WIDE)


def scaled(b: Backend, x: Value, by: float) -> Value:
    """x times a number; consumes x."""
    return x if by == 1.0 else b.scale(x, by)


def _norm_source(prefix: str, name: str, width: int, plus: float) -> tuple[tuple[Stored, ...], ...]:
    return ((Stored(f"{prefix}.{name}.weight", (width,), plus=plus),),)
