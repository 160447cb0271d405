"""Assembles the decoder that every family consists of, with the names of its parts in a checkpoint.

A family file says what attention and MLP a layer has, and in which names its checkpoint differs from the usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ktcli.layers.decoder import (
    NO_MULTIPLIERS,
    NO_NORMS,
    SEQUENTIAL,
    USUAL_NORMS,
    Attention,
    Decoder,
    DecoderLayer,
    Mlp,
    Multipliers,
    Wiring,
    below,
)
from ktcli.layers.hyper import HyperConnection
from ktcli.models.config import MAX_CONTEXT, MAX_VOCAB, TEXT, Fields, read_eps
from ktcli.models.model import Model
from ktcli.ops.table.streams import MixShape
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of the checkpoint names of a model's parts.

    Attributes:
        body: the prefix of "embed_tokens", "layers" and the last norm.
        head: the name of the output projection.
        attention, mlp: their names below a layer.
        norm_plus: the number added to the weights of the norms before attention, MLP and head.
        ignored: patterns of names that are left out on purpose, beside those of `_LEFT_OUT`.
        embedding, norm: the names of the embedding and of the last norm, below the body.
        norms: the names of the norms before attention and MLP, below a layer; "": there is none.
        after: the names of the norms of their outputs; "": there is none.
        scalar: the name of the factor of the residual after a layer; "": there is none.
    """

    body: str = "model"
    head: str = "lm_head"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norm_plus: float = 0.0
    ignored: tuple[str, ...] = ()
    embedding: str = "embed_tokens"
    norms: tuple[str, str] = USUAL_NORMS
    after: tuple[str, str] = NO_NORMS
    scalar: str = ""
    norm: str = "norm"


USUAL_PREFIXES = Prefixes()
BESIDE_VISION = Prefixes("model.language_model", ignored=("model.visual.*",))  # Qwen's and GLM's
# The field that names the activation of MLPs, and what it says.
SILU: Mapping[str, str] = {"hidden_act": "silu"}
GELU: Mapping[str, str] = {"hidden_activation": "gelu_pytorch_tanh"}
# Left out: layers of multi-token prediction, numbered on from the last layer or apart, and what follows from the
# config.
_MTP_LAYERS = 8
_LEFT_OUT = ("*.rotary_emb.inv_freq", "mtp.*", "model.mtp*")
_MAX_STREAMS, _MAX_ITERATIONS = 16, 1000  # the limits of kt_program_mix


def text_part(f: Fields, *model_types: str) -> Fields:
    """Returns the fields of the text model's config, which is nested in that of a vision-language model.

    Args:
        model_types: the values that its `model_type` may have; the first is the default.
    """
    text = Fields(f.values.get(TEXT, {}), f"config.json: {TEXT}")
    kind = text.text("model_type", model_types[0])
    text.require("model_type", kind, *model_types)
    said = {"model_type": kind, "tie_word_embeddings": f.values.get("tie_word_embeddings")}
    return Fields({**text.values, **{k: v for k, v in said.items() if v is not None}}, text.where)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The parts that all layers of a model have around their attention and MLP."""

    hidden: int
    eps: float
    prefixes: Prefixes
    streams: MixShape | None
    residual: float
    wiring: Wiring

    def layer(self, i: int, attention: Attention | None, mlp: Mlp | None) -> DecoderLayer:
        """Puts attention and MLP, if they are there, in their place. A part that names a source lies there, below its
        layer, instead of where the others do."""
        names, source = self.prefixes, below(self.prefixes.body, f"layers.{i}")
        if attention:
            where = f"{source}.{attention.source or names.attention}"
            attention = replace(attention, layer=i, source=where)
        if mlp:
            where = below(source, mlp.source or names.mlp).removesuffix(".")
            mlp = replace(mlp, layer=i, name=f"layers.{i}.mlp", source=where)
        return DecoderLayer(
            i,
            source,
            self.hidden,
            self.eps,
            attention,
            mlp,
            names.norm_plus,
            names.norms,
            self._mixers(i, source),
            added=(self.residual, self.residual),
            after=names.after,
            wiring=self.wiring,
            scalar=names.scalar,
        )

    def _mixers(self, i: int, source: str) -> tuple[HyperConnection, HyperConnection] | None:
        """Returns the hyper-connections around attention and MLP; None: the residual is one stream."""
        if self.streams is None:
            return None
        around = HyperConnection(self.hidden, self.streams, self.eps, layer=i)
        return (
            replace(around, name=f"layers.{i}.attn_mix", source=f"{source}.hc_attn"),
            replace(around, name=f"layers.{i}.mlp_mix", source=f"{source}.hc_ffn"),
        )

    @property
    def last(self) -> HyperConnection | None:
        """The hyper-connection that makes one stream of several behind the layers; None: there is only one."""
        if self.streams is None:
            return None
        source = below(self.prefixes.body, "hc_head")
        return HyperConnection(self.hidden, self.streams, self.eps, True, None, "mix", source)


def assemble(
    f: Fields,
    family: str,
    parts: Callable[[int], tuple[Attention | None, Mlp | None]],
    prefixes: Prefixes = USUAL_PREFIXES,
    streams: MixShape | None = None,
    multipliers: Multipliers = NO_MULTIPLIERS,
    wiring: Wiring = SEQUENTIAL,
    activation: Mapping[str, str] = SILU,
) -> Model:
    """Returns the model (without weights) that a config describes, assembled from the attention and MLP of each layer.

    Args:
        family: the name of the family file.
        parts: returns the attention and MLP of a layer by its number, without their place; None for one that it lacks.
        prefixes: how the checkpoint names the parts of the model.
        streams: the hyper-connections; None: the residual is one stream.
        multipliers: the factors of embedded rows, of the layers' outputs and of logits.
        wiring: the arrangement of residuals, norms, attention and MLP in a layer.
        activation: the field that names the MLPs' activation, and the only value that it may have.
    Raises:
        BadCheckpoint: a field is missing, of the wrong type, out of bounds or not supported.
    """
    f.only(activation)
    n_layers, hidden = f.n_layers, f.whole("hidden_size")
    frame = _Frame(hidden, read_eps(f), prefixes, streams, multipliers.residual, wiring)
    decoder = Decoder(
        hidden=hidden,
        vocab=f.whole("vocab_size", high=MAX_VOCAB),
        eps=frame.eps,
        layers=tuple(frame.layer(i, *parts(i)) for i in range(n_layers)),
        tied=f.flag("tie_word_embeddings", False),
        body=prefixes.body,
        head_source=prefixes.head,
        norm_plus=prefixes.norm_plus,
        embedding_name=prefixes.embedding,
        norm_name=prefixes.norm,
        mixer=frame.last,
        multipliers=multipliers,
        wiring=wiring,
    )
    context = f.whole("max_position_embeddings", high=MAX_CONTEXT)
    ignored = _ignored(prefixes, n_layers)
    return Model(family, decoder, context, ignored)


def _ignored(prefixes: Prefixes, n_layers: int) -> tuple[str, ...]:
    """Returns the patterns of names that are left out on purpose."""
    beyond = (below(prefixes.body, f"layers.{n_layers + i}.*") for i in range(_MTP_LAYERS))
    return (*_LEFT_OUT, *beyond, *prefixes.ignored)


def read_limit(f: Fields) -> float:
    """Returns the config's `final_logit_softcapping`, the bound to which logits are squashed by
    tanh; 0: there is none.
    """
    name = "final_logit_softcapping"
    return f.number(name, low=1e-3) if f.has(name) else 0.0


def read_streams(f: Fields) -> MixShape:
    """Returns the sizes and constants of a config's hyper-connections: the number of residual streams, the Sinkhorn
    iterations and the epsilon.
    """
    return MixShape(
        f.whole("hc_mult", high=_MAX_STREAMS),
        f.whole("hc_sinkhorn_iters", high=_MAX_ITERATIONS),
        f.number("hc_eps", high=1.0),
    )
