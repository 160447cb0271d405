"""The decoder that every family shares: embedding, layers of attention and MLP, norm, head."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ktcli.layers.latent import LatentAttention
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.sparse import SparseMlp
from ktcli.ops.backend import Backend, Value
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.state import LayerState, Scratch, largest
from ktcli.ops.table.rowwise import Reads
from ktcli.ops.tensors import Cut, Role, Stored, Tensor, matrix, vector
from ktcli.records import dataclass

# A model imports the kinds of layers that it has, and no others: a chat begins sooner.
if TYPE_CHECKING:
    from ktcli.layers.compressed import CompressedAttention
    from ktcli.layers.gated_delta import GatedDeltaNet
    from ktcli.layers.gates import NormGate
    from ktcli.layers.grouped_query import GroupedQueryAttention
    from ktcli.layers.hyper import HyperConnection, StreamMean
    from ktcli.layers.kimi_delta import KimiDelta
    from ktcli.layers.lightning import LightningAttention
    from ktcli.layers.mamba2 import Mamba2
    from ktcli.layers.short_conv import ShortConv

Attention: TypeAlias = (
    "GroupedQueryAttention | LatentAttention | GatedDeltaNet | KimiDelta | CompressedAttention | Mamba2 | "
    "LightningAttention | ShortConv"
)
Mlp = DenseMlp | SparseMlp
T = TypeVar("T")
USUAL_NORMS = "input_layernorm", "post_attention_layernorm"
NO_NORMS = "", ""


def below(prefix: str, name: str) -> str:
    """Returns the checkpoint name "prefix.name", or `name` alone if the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The factors of a model's embedded rows, of the outputs of attention and MLP, and of its logits (Granite); and the
    limit that keeps logits by tanh (Gemma), 0: none."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    limit: float = 0.0


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True, slots=True)
class Wiring:
    """The arrangement of residuals, norms and parts in a decoder layer.

    Attributes:
        parallel: MLP reads what attention reads, instead of what it made: one norm is before both (Cohere).
        centred: norms subtract the mean: LayerNorm instead of RMSNorm.
        shifted: these norms have a bias (Phi-3.5-MoE).
        postnorm: outputs are added to what the part has read, behind its norm, not to what came before (MiniMax).
    """

    parallel: bool = False
    centred: bool = False
    shifted: bool = False
    postnorm: bool = False


SEQUENTIAL = Wiring()


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer: x + attention(norm(x)), then x + mlp(norm(x)); or as its wiring says.

    A part without a norm in front reads the residual, and norms it itself.

    Attributes:
        attention, mlp: its two parts; None: the layer has only the other one (Nemotron).
        kept, added: the factors in the sums behind attention and MLP, of the residual and of the output.
        after: names of norms of these outputs (Trinity, Gemma); "": there is none.
        scalar: the name of a factor of the residual after the layer (Gemma 4); "": there is none.
        gates: the gates on what the norms before attention and MLP give (A.X K2); None: there is none.
        source: checkpoint prefix, e.g. "model.layers.3".
        norm_plus: the number added to the weights of its norms.
        norm_names: names of its norms, below `source`; "": there is none (FlexOlmo).
        mixers: the hyper-connections around attention and MLP; None: each is added to the residual.
    """

    layer: int
    source: str
    hidden: int
    eps: float
    attention: Attention | None
    mlp: Mlp | None
    norm_plus: float = 0.0
    norm_names: tuple[str, str] = USUAL_NORMS
    mixers: tuple[HyperConnection, HyperConnection] | None = None
    kept: tuple[float, float] = (1.0, 1.0)
    added: tuple[float, float] = (1.0, 1.0)
    after: tuple[str, str] = NO_NORMS
    wiring: Wiring = SEQUENTIAL
    scalar: str = ""
    gates: tuple[NormGate | None, NormGate | None] = (None, None)

    @cached_property
    def parts(self) -> tuple[Attention | Mlp, ...]:
        """The parts of the layer in order: attention, then MLP; one that the layer lacks is left out."""
        return tuple(part for part in (self.attention, self.mlp) if part is not None)

    @cached_property
    def norms(self) -> tuple[Tensor | None, ...]:
        """The gains [hidden] of the norms before attention and MLP, one for each part that the layer has; None where
        there is no norm."""
        return self._norms("norm", self.norm_names)

    @cached_property
    def norms_after(self) -> tuple[Tensor | None, ...]:
        """The gains [hidden] of the norms of attention's and MLP's outputs, one for each part that the layer has; None
        where there is no norm."""
        return self._norms("norm_after", self.after)

    def _norms(self, kind: str, names: tuple[str, str]) -> tuple[Tensor | None, ...]:
        own = self._of_parts((("attn", names[0]), ("mlp", names[1])))
        return tuple(self._norm(f"{of}_{kind}", source) if source else None for of, source in own)

    def _of_parts(self, both: tuple[T, T]) -> tuple[T, ...]:
        """Returns, of one thing for attention and one for the MLP, those of the parts that there are."""
        pairs = zip(both, (self.attention, self.mlp), strict=True)
        return tuple(each for each, part in pairs if part is not None)

    def _norm(self, name: str, source: str) -> Tensor:
        return self._vector(name, _stored_norm(self.source, source, self.hidden, self.norm_plus))

    def _vector(self, name: str, stored: Stored) -> Tensor:
        return vector(f"layers.{self.layer}.{name}", stored, layer=self.layer)

    @cached_property
    def factor(self) -> Tensor | None:
        """The factor [1] that the residual is multiplied by at the end of the layer; None: there is none."""
        if not self.scalar:
            return None
        return self._vector("scalar", Stored(below(self.source, self.scalar), (1,)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the layer, those it has, in this order: MLP, attention, norms, gates of norms, the
        factor of the residual, and hyper-connections."""
        mixed = [tensor for mixer in self.mixers or () for tensor in mixer.tensors]
        norms = [norm for norm in (*self.norms, *self.norms_after) if norm]
        if self.wiring.centred:
            norms += [_shift(norm, self.wiring) for norm in norms]
        own = [tensor for part in reversed(self.parts) for tensor in part.tensors]
        factor = () if self.factor is None else (self.factor,)
        gates = [tensor for gate in self.gates if gate for tensor in gate.tensors]
        return (*own, *norms, *gates, *factor, *mixed)

    @property
    def state(self) -> LayerState:
        """The sizes of one sequence's state in this layer: those of its attention, or all zero in a layer without
        attention."""
        return self.attention.state if self.attention else LayerState()

    @property
    def kind(self) -> DecoderLayer:
        """A copy of the layer without its number and names: copies of layers that compute alike are equal."""
        attention = self.attention and replace(self.attention, layer=0, source="")
        mlp = self.mlp and replace(self.mlp, layer=0, name="", source="")
        around = [replace(each, layer=0, name="", source="") for each in self.mixers or ()]
        mixers = (around[0], around[1]) if around else None
        before, behind = (g and replace(g, layer=0, name="", source="") for g in self.gates)
        made = replace(self, layer=0, source="", attention=attention, mlp=mlp, mixers=mixers)
        return replace(made, gates=(before, behind))

    @property
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs: the largest that attention, MLP or their
        hyper-connections need, as they use the same buffers in turn."""
        return largest(part.scratch for part in (*self.parts, *(self.mixers or ())))

    def forward(self, b: Backend, x: Value) -> Value:
        """Returns the residual after the layer, of the same shape as x, the residual before it: [T, hidden], or [T,
        streams * hidden] with hyper-connections."""
        if self.wiring.parallel:
            entered = self._entered(b, x, 0)
            for block in self.parts:
                x = b.add(x, block.forward(b, entered))
            return x
        kept, added = self._of_parts(self.kept), self._of_parts(self.added)
        for i, block in enumerate(self.parts):
            if self.mixers is None:
                entered = self._entered(b, x, i)
                inner = block.forward(b, entered)
                if after := self.norms_after[i]:
                    inner = b.norm(inner, after, self.eps)
                x = scaled(b, entered if self.wiring.postnorm else x, kept[i])
                x = b.add(x, scaled(b, inner, added[i]))
            else:
                entered, leaving = self.mixers[i].enter(b, x)
                inner = block.forward(b, self._entered(b, entered, i))
                x = b.expand(x, inner, leaving)
        return x if self.factor is None else b.scale(x, 1.0, factor=self.factor)

    def _entered(self, b: Backend, x: Value, i: int) -> Value:
        """Returns what part i reads of the residual x."""
        norm, gate = self.norms[i], self._of_parts(self.gates)[i]
        y = x if norm is None else normed(b, x, norm, self.eps, self.wiring)
        return y if gate is None else gate.forward(b, y)


@dataclass(frozen=True)
class Decoder:
    """The whole model: embedding, layers, last norm and head.

    Attributes:
        tied: whether a checkpoint may have only one of embedding and head, which is then both.
        body: checkpoint prefix of embedding and norm, e.g. "model".
        head_source: checkpoint prefix of the head.
        norm_plus: the number added to the weights of the last norm.
        embedding_name, norm_name: the names of the embedding and of the last norm, below the body.
        mixer: makes one stream of the residual's several; None: there is only one.
        multipliers: factors of embedded rows and logits; the layers have their own.
        wiring: how the last norm is; the layers have their own.
        head_bias: whether the head has a bias (Phi-3.5-MoE).
        headless: whether the model ends at its last norm, as one for embeddings does: it gives hidden rows.
    """

    hidden: int
    vocab: int
    eps: float
    layers: tuple[DecoderLayer, ...]
    tied: bool = False
    body: str = "model"
    head_source: str = "lm_head"
    norm_plus: float = 0.0
    embedding_name: str = "embed_tokens"
    norm_name: str = "norm"
    mixer: HyperConnection | StreamMean | None = None
    multipliers: Multipliers = NO_MULTIPLIERS
    wiring: Wiring = SEQUENTIAL
    head_bias: bool = False
    headless: bool = False

    @cached_property
    def embedding(self) -> Tensor:
        """The token embedding [vocab, hidden]; if `tied`, it is made from the output head where the checkpoint has only
        that."""
        rows, head = self._rows
        made = matrix(
            "embed", rows, role=Role.TABLE, cut=Cut.NONE, layer=None, part=ModelPart.EMBEDDING
        )
        sources = (*made.sources, (head,)) if self.tied else made.sources
        return replace(made, sources=sources, access=Access.ROWS)

    @cached_property
    def head(self) -> Tensor:
        """The output head [vocab, hidden]; if `tied`, it is made from the embedding where the checkpoint has only
        that."""
        rows, head = self._rows
        made = matrix("lm_head", head, layer=None, part=ModelPart.HEAD)
        sources = (*made.sources, (rows,)) if self.tied else made.sources
        # What a norm with a bias gives is a product of its gain only in part.
        gain = None if self.wiring.shifted else self.norm
        return replace(made, sources=sources, gain=gain, access=Access.OUTPUTS)

    @cached_property
    def bias(self) -> Tensor | None:
        """The bias [vocab] of the output head; None: there is none."""
        if not self.head_bias:
            return None
        stored = Stored(f"{self.head_source}.bias", (self.vocab,))
        return vector("lm_head_bias", stored, layer=None, neutral=0.0)

    @cached_property
    def norm(self) -> Tensor:
        """The gain [hidden] of the final norm, before the output head."""
        stored = _stored_norm(self.body, self.norm_name, self.hidden, self.norm_plus)
        return vector("norm", stored, layer=None)

    @property
    def _rows(self) -> tuple[Stored, Stored]:
        """The rows of embedding and of head, one for each token of the vocabulary."""
        names = below(self.body, self.embedding_name), self.head_source
        embedding, head = (Stored(f"{name}.weight", (self.vocab, self.hidden)) for name in names)
        return embedding, head

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors of the model, those it has, in this order: embedding, layers, the mixer that joins the
        residual's streams, final norm and its bias, output head and its bias."""
        inner = tuple(tensor for layer in self.layers for tensor in layer.tensors)
        mixed = self.mixer.tensors if self.mixer else ()
        shift = (_shift(self.norm, self.wiring),) if self.wiring.centred else ()
        ends = (
            () if self.headless else (self.head,) if self.bias is None else (self.head, self.bias)
        )
        return (self.embedding, *inner, *mixed, self.norm, *shift, *ends)

    @property
    def one_of_each(self) -> Decoder:
        """A copy of the decoder with only the first layer of each kind; layers of a kind compute alike (see
        `DecoderLayer.kind`)."""
        first = {layer.kind: layer for layer in reversed(self.layers)}
        kept = sorted(first.values(), key=lambda layer: layer.layer)
        return replace(self, layers=tuple(kept))

    @property
    def scratch(self) -> Scratch:
        """The widths of the buffers, in columns per token, that a step needs: the largest that any layer needs, as all
        use the same buffers in turn."""
        return largest(layer.scratch for layer in self.layers)

    @property
    def borders(self) -> tuple[int, ...]:
        """The numbers of the layers, except the first, at which the model may be split between devices: those that do
        not use an earlier layer's choice of positions."""
        return tuple(
            layer.layer
            for layer in self.layers[1:]
            if not (isinstance(layer.attention, LatentAttention) and layer.attention.follows)
        )

    def forward(self, b: Backend) -> Value:
        """Returns the logits [outputs, vocab] after the ids of the step that give outputs, or their hidden rows
        [outputs, hidden] if `headless`."""
        return self.part(b, None, 0, len(self.layers))

    def part(self, b: Backend, x: Value | None, first: int, last: int) -> Value:
        """Computes layers first..last - 1; returns the residual after them or, if the last layer of the model is one of
        them, what `forward` returns.

        Args:
            x: the residual before layer `first`; None, for the first layer of the model: the ids of the step are
                embedded.
        """
        if x is None:
            x = scaled(b, b.embed(self.embedding), self.multipliers.embedding)  # [T, hidden]
            if self.mixer:
                x = b.spread(x, self.mixer.streams)
        for number in range(first, last):
            x = self.layer(b, x, number)
        return self._ending(b, x) if last == len(self.layers) else x

    def layer(self, b: Backend, x: Value, number: int) -> Value:
        """Computes layer `number`; returns the residual after it, of the same shape as x, the residual before it."""
        b.begin_layer(self.layers[number].layer)
        return self.layers[number].forward(b, x)

    def _ending(self, b: Backend, x: Value) -> Value:
        b.begin_layer(None)
        x = b.select(x)
        if self.mixer:
            x, _ = self.mixer.enter(b, x)
        # Wide: one column of a trained head may be far larger than the others, and 8-bit activations with one scale
        # then cost more here than in all layers together (kt-mini: 0.0009 of 0.0012 nats per token).
        x = normed(b, x, self.norm, self.eps, self.wiring)
        if self.headless:
            return x
        x = scaled(b, x, self.multipliers.logits)
        logits = b.linear(x, self.head, bias=self.bias, reads=Reads.WIDE)
        limit = self.multipliers.limit
        return b.scale(logits, 1.0, limit=limit) if limit else logits


def normed(b: Backend, x: Value, gain: Tensor, eps: float, wiring: Wiring) -> Value:
    """Returns the rows of x, in the same shape, after RMSNorm with the gain `gain`, or after LayerNorm if
    `wiring.centred`."""
    if wiring.centred:
        return b.layer_norm(x, gain, _shift(gain, wiring), eps)
    return b.norm(x, gain, eps)


def _shift(gain: Tensor, wiring: Wiring) -> Tensor:
    """Returns the bias of a LayerNorm, zeros where the wiring says that the checkpoint has none."""
    (stored,) = gain.sources[0]
    bias = replace(stored, name=f"{stored.name.removesuffix('weight')}bias", plus=0.0)
    sources = ((bias,),) if wiring.shifted else ((),)
    return replace(gain, name=f"{gain.name}_bias", sources=sources, neutral=0.0)


def scaled(b: Backend, x: Value, by: float) -> Value:
    """Returns x times `by`, which overwrites x; x itself if `by` is 1."""
    return x if by == 1.0 else b.scale(x, by)


def _stored_norm(prefix: str, name: str, width: int, plus: float) -> Stored:
    return Stored(below(prefix, f"{name}.weight"), (width,), plus=plus)
