"""Hyper-connections: a residual of several streams instead of one.

Each token computes the weights by which its streams become a block's input, and by which they and the block's
output become the next streams. Source: mHC, arXiv 2512.24880; transformers 5.23 (deepseek_v4).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.state import Scratch
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.table.streams import MixShape
from ktcli.ops.tensors import Stored, Tensor, kept_whole, vector
from ktcli.records import dataclass


@dataclass(frozen=True)
class HyperConnection:
    """The mixing of streams around one block, or, at the end of the stack, into a single stream.

    Attributes:
        eps: eps of the norm of the streams, which has no gain.
        at_end: whether it stands at the end of the stack.
        layer: number of the decoder layer; None at the end.
        name: prefix of the stored names, e.g. "layers.3.attn_mix".
        source: prefix of the checkpoint's names, e.g. "layers.3.hc_attn".
    """

    hidden: int
    shape: MixShape
    eps: float
    at_end: bool = False
    layer: int | None = None
    name: str = ""
    source: str = ""

    @property
    def streams(self) -> int:
        """The number of streams of the residual."""
        return self.shape.streams

    @property
    def _weights(self) -> int:
        return self.shape.streams if self.at_end else self.shape.weights

    @cached_property
    def projection(self) -> Tensor:
        """The weight [weights, streams * hidden] that projects the streams to the weights by which they are mixed;
        stored unquantized, like a router. In bf16 instead of f32, as published, it moves the logits of random models by
        0.0005 of their spread."""
        shape = (self._weights, self.shape.streams * self.hidden)
        stored = Stored(f"{self.source}_fn", shape)
        name = f"{self.name}.fn"
        made = kept_whole(name, stored, layer=self.layer, part=ModelPart.HYPER)
        return replace(made, access=Access.OUTPUTS) if self.at_end else made

    @cached_property
    def scale(self) -> Tensor:
        """Three learned factors, of the logits of the weights that mix the streams into a block's input, its output
        into the streams, and the streams with each other; only the first at the end of the stack."""
        return self._vector("scale", 1 if self.at_end else 3)

    @cached_property
    def base(self) -> Tensor:
        """The bias of the logits of the mixing weights, [weights]."""
        return self._vector("base", self._weights)

    def _vector(self, name: str, length: int) -> Tensor:
        stored = Stored(f"{self.source}_{name}", (length,))
        return vector(f"{self.name}.{name}", stored, layer=self.layer)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the hyper-connection: projection, factors and bias."""
        return self.projection, self.scale, self.base

    @property
    def scratch(self) -> Scratch:
        """The width of the buffer that a step needs, per token, for the residual of several streams: streams *
        hidden."""
        return Scratch(streams=self.shape.streams * self.hidden)

    def enter(self, b: Backend, x: Value) -> tuple[Value, Value | None]:
        """Returns the block's input [T, hidden], mixed from the streams x [T, streams * hidden], and the weights with
        which `Backend.expand` mixes the block's output back into the streams; None in their place at the end of the
        stack."""
        wanted = b.linear(b.norm(x, None, self.eps), self.projection, reads=Reads.F32)
        weights = b.mix(wanted, self.scale, self.base, self.shape)
        if self.at_end:
            return b.collapse(x, weights), None
        n = self.shape.streams
        entry, leaving = b.split(weights, n, self.shape.weights - n)
        return b.collapse(x, entry), leaving


@dataclass(frozen=True)
class StreamMean:
    """Averages all streams into one at the end of the stack, without weights (GLM-5.3)."""

    hidden: int
    streams: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the mean of the streams: none, so ()."""
        return ()

    def enter(self, b: Backend, x: Value) -> tuple[Value, None]:
        """Returns the mean [T, hidden] of the streams x [T, streams * hidden], and None, as there are no weights to mix
        back with."""
        first, *others = b.split(x, *(self.streams * (self.hidden,)))
        for other in others:
            first = b.add(first, other)
        return b.scale(first, 1 / self.streams), None
