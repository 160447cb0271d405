"""Granite-MoE (1B-A400M, 3B-A800M), also with a shared expert or with sliding windows: rows, scores and logits have
multipliers.

Embedded rows, attention scores, the outputs of attention and MLP, and logits each have a multiplier. The kind with
windows has sinks in every layer, and a rotary base for each; a layer with base 0 has no rotary embedding. Source:
transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp, Multipliers
from ktcli.layers.grouped_query import GroupedQueryAttention
from ktcli.layers.names import (
    EachExpert,
    FusedExperts,
    MlpNames,
    RouterNames,
    SharedNames,
    SparseNames,
)
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_windows
from ktcli.models.skeleton import Prefixes, assemble

MODEL_TYPES: Defaults = {
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoe_swa": {"sliding_window": 128},
}

cut = cut_layers

_MOST = 1e6  # the largest multiplier
_THETAS = "layer_rope_theta"
PREFIXES = Prefixes(mlp="block_sparse_moe")
_WITHIN = MlpNames(fused="input_linear.weight", down="output_linear.weight")
SHARED = SharedNames("shared_mlp", within=_WITHIN, beside=True)
_SLIDING_NAMES = SparseNames(router=RouterNames("router.weight"), shared=SHARED)
_NAMES = SparseNames(
    (EachExpert(), FusedExperts("input_linear.weight", "output_linear.weight")),
    RouterNames("router.layer.weight"),
    SHARED,
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    sliding = f.text("model_type", "") == "granitemoe_swa"
    sparse = replace(read_experts(f), names=_SLIDING_NAMES if sliding else _NAMES)
    if f.text("model_type", "") == "granitemoe":
        sparse = replace(sparse, shared_width=0)
    attend = _sliding(f) if sliding else lambda _: read_attention(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attend(i), sparse

    return assemble(f, "granitemoe", parts, PREFIXES, multipliers=read_multipliers(f))


def read_experts(f: Fields) -> SparseMlp:
    """Returns the mixture-of-experts MLP that a Granite config describes, with a shared expert
    unless its width is 0.
    """
    return SparseMlp(
        f.whole("hidden_size"),
        f.whole("intermediate_size"),
        read_routing(f, normalize=True),
        shared_width=f.whole("shared_intermediate_size", low=0, default=0),
        names=_NAMES,
    )


def read_multipliers(f: Fields) -> Multipliers:
    """Returns a Granite config's factors of the embedded rows, of what attention and MLP add to the residual, and of
    the logits (1 / `logits_scaling`); each is 1 if the config lacks it.
    """
    return Multipliers(
        embedding=_multiplier(f, "embedding_multiplier"),
        residual=_multiplier(f, "residual_multiplier"),
        logits=1.0 / _multiplier(f, "logits_scaling"),
    )


def _multiplier(f: Fields, name: str) -> float:
    return f.number(name, low=1 / _MOST, high=_MOST, default=1.0)


def read_attention(f: Fields) -> GroupedQueryAttention:
    """Returns the grouped-query attention layer that a Granite config describes, with scores scaled by
    `attention_multiplier`.
    """
    own = read_gqa(f, biased=True)
    return replace(own, shape=replace(own.shape, scale=_multiplier(f, "attention_multiplier")))


def _sliding(f: Fields) -> Any:
    """Returns the attention of each layer of the kind with windows."""
    window = read_windows(f, default=lambda i: i % 4 > 0)
    thetas = _thetas(f)

    def attend(i: int) -> GroupedQueryAttention:
        given = f.values.get("rope_parameters") or f.values.get("rope_scaling") or {}
        rope = {**Fields(given, f"{f.where}: rope").values, "rope_theta": thetas[i]}
        values = {**f.values, "rope_parameters": rope} if thetas[i] else f.values
        own = replace(read_attention(Fields(values, f.where)), sinks_name="sinks").within(window(i))
        return replace(own, rope=None) if thetas[i] == 0 else own

    return attend


def _thetas(f: Fields) -> list[float | None]:
    """Returns the rotary base of each layer; None: the one that all have."""
    listed = f.values.get(_THETAS)
    if listed is None:
        return [None] * f.n_layers
    if not isinstance(listed, list) or len(listed) < f.n_layers:
        raise BadCheckpoint(f"{f.where}: {_THETAS} is not a list of {f.n_layers} layers")
    each = [
        Fields({_THETAS: one}, f.where).number(_THETAS, high=1e12) for one in listed[: f.n_layers]
    ]
    return list(each)
