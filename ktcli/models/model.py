"""Declares what a family file provides: the facts of one model, its tensors, and its forward pass.

`Spec` holds the few numbers that planner, engine and commands need; everything about bytes follows from
the tensors, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ktcli.layers.decoder import Decoder, DecoderLayer
from ktcli.layers.rope import at_context
from ktcli.layers.sparse import SparseMlp
from ktcli.models.pooling import TextPooling
from ktcli.native import Glu
from ktcli.ops.backend import Backend, Value
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import Buffer, record
from ktcli.ops.state import LayerState, Scratch
from ktcli.ops.tensors import Tensor, counted
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """The sizes of one model that planner, engine and commands need.

    Attributes:
        family: the name of the family file, e.g. "deepseek".
        hidden: width of the residual stream.
        layers: decoder layers (a multi-token-prediction layer is not one).
        moe_layers: the number of those with routed experts.
        vocab: rows of the embedding.
        context: positions the model was made for.
        states: what each layer keeps of a sequence.
        experts, top_k, expert_width: experts of a MoE layer, experts per token, and their width; 0 for a dense model.
        expert_hidden: width of the rows that experts read and give.
        glus: the activation of the experts of each MoE layer.
        scratch: what one step needs beside the residual stream.
        embeds: whether a step gives hidden rows, of which embeddings are made, instead of logits.
    """

    family: str
    hidden: int
    layers: int
    moe_layers: int
    vocab: int
    context: int
    states: tuple[LayerState, ...]
    experts: int
    top_k: int
    expert_width: int
    expert_hidden: int
    glus: tuple[Glu, ...]
    scratch: Scratch
    embeds: bool = False

    @property
    def output_width(self) -> int:
        """The number of columns of a step's output rows: the vocabulary size for logits, or the hidden size for an
        embedding model.
        """
        return self.hidden if self.embeds else self.vocab

    @property
    def position_elements(self) -> int:
        """The number of elements (keys, values, latents …) that all layers together store in the KV cache for one
        position.
        """
        return sum(state.position_elements for state in self.states)

    @property
    def position_heads(self) -> int:
        """The number of key, value and latent heads that all layers together cache for one position; an fp8 cache has a
        scale for each.
        """
        return sum(state.position_heads for state in self.states)

    @property
    def window(self) -> int:
        """The number of positions in the widest sliding window among the layers with sliding-window pages, which a
        sequence releases when the window has passed; 0: there are none.
        """
        return max((state.window for state in self.states if state.windowed), default=0)

    @property
    def window_elements(self) -> int:
        """The number of elements that the layers with sliding-window pages together cache for one position, a part of
        `position_elements`.
        """
        return sum(state.position_elements for state in self.states if state.windowed)

    @property
    def window_heads(self) -> int:
        """The number of heads that the layers with sliding-window pages together cache for one position, a part of
        `position_heads`.
        """
        return sum(state.position_heads for state in self.states if state.windowed)

    @property
    def deferrable(self) -> int:
        """The largest number of a token's experts whose output may be added one MoE layer late (deferral): all `top_k`,
        or 0 where experts compute in a latent space of each layer's own.
        """
        return self.top_k if self.expert_hidden == self.hidden else 0

    @property
    def latent(self) -> bool:
        """Whether some layer has multi-head latent attention (MLA), which has two forms that differ in rounding, see
        `engine.forms`.
        """
        return any(state.expanded_ops for state in self.states)

    @property
    def chooses(self) -> bool:
        """Whether some layer attends only to positions that an indexer chose, or to pooled rows, see
        `LayerState.chooses`.
        """
        return any(state.chooses for state in self.states)

    @property
    def sequence_elements(self) -> int:
        """The number of f32 elements of fixed-size state (recurrent layers, convolutions) that all layers together
        store for one sequence, whatever its length.
        """
        return sum(state.sequence_elements for state in self.states)


@dataclass(frozen=True)
class Model:
    """A built model, without weights or memory: a decoder, as the models of all families are.

    Attributes:
        context: positions the model was made for.
        ignored: the patterns (`fnmatch`) of checkpoint names that are left out on purpose.
        pooling: the way in which an embedding model makes one vector of a text; None: it is not one.
    """

    family: str
    decoder: Decoder
    context: int
    ignored: tuple[str, ...] = ()
    pooling: TextPooling | None = None

    @cached_property
    def spec(self) -> Spec:
        """The sizes of the model (hidden size, layers, vocabulary, experts, cache per position …). The sizes of experts
        are those of the first MoE layer.
        """
        layers = self.decoder.layers
        sparse = [layer.mlp for layer in layers if isinstance(layer.mlp, SparseMlp)]
        return Spec(
            family=self.family,
            hidden=self.decoder.hidden,
            layers=len(layers),
            moe_layers=len(sparse),
            vocab=self.decoder.vocab,
            context=self.context,
            states=tuple(layer.state for layer in layers),
            experts=sparse[0].routing.experts if sparse else 0,
            top_k=sparse[0].routing.top_k if sparse else 0,
            expert_width=sparse[0].width if sparse else 0,
            expert_hidden=sparse[0].expert_hidden if sparse else 0,
            glus=tuple(mlp.glu for mlp in sparse),
            scratch=self.decoder.scratch,
            embeds=self.decoder.headless,
        )

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The declarations of the weight tensors that a pack stores, with name and shape: embedding, layers in order,
        the mixer of residual streams, final norm, output head and biases; those that the model has.
        """
        return self.decoder.tensors

    @cached_property
    def counted(self) -> tuple[tuple[Tensor, int], ...]:
        """Pairs of a declared weight tensor and the number of tensors of the same size and use, itself included; the
        first tensor of each kind represents it.
        """
        return counted(self.tensors)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The activation buffers that a program for one layer of each kind writes: for each, its columns of f32, and
        whether it has a row per wanted output instead of per token. Further layers reuse them.
        """
        return reuse_buffers(record(self.decoder.one_of_each.forward)).buffers

    @cached_property
    def operations(self) -> int:
        """The number of operations recorded for one forward pass through all layers."""
        return len(record(self.forward).records)

    def at(self, context: int) -> Model:
        """Returns the model for a context of `context` positions: LongRoPE embeddings, which depend on it, are replaced
        by the rotary embeddings for that length.
        """
        return at_context(self, context)

    def pooled(self, pooling: TextPooling) -> Model:
        """Returns a copy of the model as an embedding model: without an output head, and with `pooling` to make one
        vector of a text.
        """
        ignored = (*self.ignored, f"{self.decoder.head_source}.*")
        headless = replace(self.decoder, headless=True)
        return replace(self, decoder=headless, ignored=ignored, pooling=pooling)

    def with_layers(self, change: Callable[[DecoderLayer], DecoderLayer]) -> Model:
        """Returns a copy of the model with each of its decoder layers replaced by `change(layer)`."""
        layers = tuple(map(change, self.decoder.layers))
        return replace(self, decoder=replace(self.decoder, layers=layers))

    def forward(self, b: Backend) -> Value:
        """Records or computes one step on backend `b`, and returns its logits [outputs, vocab], or hidden rows
        [outputs, hidden] where `Spec.embeds` says so."""
        return self.decoder.forward(b)

    @property
    def borders(self) -> tuple[int, ...]:
        """The numbers of the decoder layers, except layer 0, that may be the first on another device: those that do not
        reuse positions chosen by an earlier layer.
        """
        return self.decoder.borders

    def part(self, b: Backend, x: Value | None, first: int, last: int) -> Value:
        """Computes or records layers [first, last) of a step; returns the residual [T, hidden] after them or, if they
        include the model's last layer, what `forward` returns.

        Args:
            x: the residual [T, hidden] before layer `first`; None: the step's token ids are embedded.
        """
        return self.decoder.part(b, x, first, last)

    def layer(self, b: Backend, x: Value, number: int) -> Value:
        """Computes or records decoder layer `number` of a step alone: takes the residual x [T, hidden] before it and
        returns that after it.
        """
        return self.decoder.layer(b, x, number)
