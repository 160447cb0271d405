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
        """The width of the rows that a step gives: logits of the vocabulary, or hidden rows."""
        return self.hidden if self.embeds else self.vocab

    @property
    def position_elements(self) -> int:
        """The number of elements that all layers together cache for one position."""
        return sum(state.position_elements for state in self.states)

    @property
    def position_heads(self) -> int:
        """The number of heads that all layers together cache for one position, see `LayerState.position_heads`."""
        return sum(state.position_heads for state in self.states)

    @property
    def window(self) -> int:
        """The number of positions that the widest window reaches, of the layers that have pages of their own for
        it; 0: none."""
        return max((state.window for state in self.states if state.windowed), default=0)

    @property
    def window_elements(self) -> int:
        """The number of elements of `position_elements` that the layers with window pages cache."""
        return sum(state.position_elements for state in self.states if state.windowed)

    @property
    def window_heads(self) -> int:
        """The number of heads of `position_heads` that the layers with window pages cache."""
        return sum(state.position_heads for state in self.states if state.windowed)

    @property
    def deferrable(self) -> int:
        """The number of a token's experts that may be added with those of the next layer; 0 where each layer's experts
        compute in a latent space of its own.
        """
        return self.top_k if self.expert_hidden == self.hidden else 0

    @property
    def latent(self) -> bool:
        """Whether some layer has latent attention, whose form changes last bits, see `engine.forms`."""
        return any(state.expanded_ops for state in self.states)

    @property
    def chooses(self) -> bool:
        """Whether some layer attends to chosen positions or pooled rows, see `LayerState.chooses`."""
        return any(state.chooses for state in self.states)

    @property
    def sequence_elements(self) -> int:
        """The number of f32 elements of the states of one sequence in all layers, whatever its length."""
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
        """The sizes of the model; those of experts are the first layer's that has them."""
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
        """The stored tensors: embedding, layers in order, final norm, and the head if there is one."""
        return self.decoder.tensors

    @cached_property
    def counted(self) -> tuple[tuple[Tensor, int], ...]:
        """The tensors counted by size, see `ops.tensors.counted`."""
        return counted(self.tensors)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that a program for one layer of each kind writes, which all other layers use again."""
        return reuse_buffers(record(self.decoder.one_of_each.forward)).buffers

    @cached_property
    def operations(self) -> int:
        """The number of operations that the forward of all layers records."""
        return len(record(self.forward).records)

    def at(self, context: int) -> Model:
        """Returns the model for a context of `context` positions, which may decide a rotary embedding."""
        return at_context(self, context)

    def pooled(self, pooling: TextPooling) -> Model:
        """Returns the model without its head, as an embedding model with this pooling."""
        ignored = (*self.ignored, f"{self.decoder.head_source}.*")
        headless = replace(self.decoder, headless=True)
        return replace(self, decoder=headless, ignored=ignored, pooling=pooling)

    def with_layers(self, change: Callable[[DecoderLayer], DecoderLayer]) -> Model:
        """Returns the model with each of its layers changed."""
        layers = tuple(map(change, self.decoder.layers))
        return replace(self, decoder=replace(self.decoder, layers=layers))

    def forward(self, b: Backend) -> Value:
        """Records or computes one step on backend `b`, and returns its logits [outputs, vocab], or hidden rows
        [outputs, hidden] where `Spec.embeds` says so."""
        return self.decoder.forward(b)

    @property
    def borders(self) -> tuple[int, ...]:
        """The numbers of the layers that may begin on another device than the layer before."""
        return self.decoder.borders

    def part(self, b: Backend, x: Value | None, first: int, last: int) -> Value:
        """Computes layers [first, last) of a step, with the embedding before the first layer and the head behind
        the last; returns the residual before layer `last`, or the logits."""
        return self.decoder.part(b, x, first, last)

    def layer(self, b: Backend, x: Value, number: int) -> Value:
        """Computes one layer of a step alone; returns the residual after it."""
        return self.decoder.layer(b, x, number)
