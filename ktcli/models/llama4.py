"""Llama 4 (Scout, Maverick; the text without vision): attention within chunks, and layers without positions, whose
queries grow with the logarithm of theirs.

One expert is chosen, which reads its rows times a gate, beside a shared one; Maverick has experts in every second
layer. Source: transformers 5.23 (llama4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import GroupedQueryAttention, NormedQk, QkNorms
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.names import EachExpert, FusedExperts, RouterNames, SharedNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CONTEXT, MAX_LAYERS, TEXT, Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, cut_layers, read_numbers, read_types
from ktcli.models.skeleton import Prefixes, assemble, text_part
from ktcli.ops.table.rowwise import Temper

_TEXT, _VISION = "llama4_text", "llama4"
_ROTATED, _SPARSE, _STEP = "no_rope_layers", "moe_layers", "interleave_moe_layer_step"
_CHUNKED, _WIDTH, _TEMPERED = "chunked_attention", "attention_chunk_size", "attn_temperature_tuning"
_TIED = "tie_word_embeddings"
_USUAL = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 1,
    "rope_theta": 500_000.0,
    _STEP: 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    _WIDTH: 8192,
    _TEMPERED: True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
MODEL_TYPES: Defaults = {
    _TEXT: _USUAL,
    _VISION: {TEXT: _USUAL},
}

_OWN = Prefixes(mlp="feed_forward")
_BESIDE_VISION = replace(
    _OWN,
    body="language_model.model",
    head="language_model.lm_head",
    ignored=("vision_model.*", "multi_modal_projector.*"),
)
_NAMES = SparseNames(
    experts=(FusedExperts(across=True), EachExpert()),
    router=RouterNames("router.weight"),
    shared=SharedNames("shared_expert"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    sees = f.values["model_type"] == _VISION
    # What the whole says of a tied head does not count.
    f = text_part(Fields({**f.values, _TIED: None}), _TEXT) if sees else f
    of, is_sparse, sparse = _attention(f), _sparse_layers(f), _sparse(f)
    dense = DenseMlp(f.whole("hidden_size"), f.whole("intermediate_size_mlp"))

    def parts(i: int) -> tuple[Attention, Mlp]:
        return of(i), sparse if is_sparse(i) else dense

    return assemble(f, "llama4", parts, _BESIDE_VISION if sees else _OWN)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    made = cut_layers(f, layers)
    if (listed := read_numbers(f, _SPARSE)) is None:
        return {**made, _STEP: min(f.whole(_STEP, high=MAX_LAYERS), layers)}
    return {**made, _SPARSE: sorted({*(i for i in listed if i < layers), layers - 1})}


def _attention(f: Fields) -> Callable[[int], GroupedQueryAttention]:
    """Returns a function from a layer's number to its attention."""
    plain = read_gqa(f, biased=True, interleaved=True)
    norms = QkNorms(NormedQk.ROTATED, weighted=False) if f.flag("use_qk_norm", True) else None
    rotated = replace(plain, norms=norms)
    still = replace(plain, rope=None, temper=_temper(f))
    turns, chunked = _rotated_layers(f), _chunked_layers(f)
    width = f.whole(_WIDTH, high=MAX_CONTEXT) if f.has(_WIDTH) else 0

    def of(i: int) -> GroupedQueryAttention:
        own = rotated if turns(i) else still
        return own.in_chunks(width) if chunked(i) else own

    if not width and any(map(chunked, range(f.n_layers))):
        raise BadCheckpoint(f"{f.where}: {_WIDTH} is missing, but there are layers of {_CHUNKED}")
    return of


def _temper(f: Fields) -> Temper | None:
    """Reads what queries without positions are multiplied by; None: nothing. Older configs have a number for the
    flag."""
    said = f.values.get(_TEMPERED)
    tempered = bool(said) if type(said) is int else f.flag(_TEMPERED, True)
    scale, every = f.number("attn_scale", high=1e3), f.whole("floor_scale", high=MAX_CONTEXT)
    return Temper(scale, every, shift=1) if tempered else None


def _rotated_layers(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells whether a layer has positions: as a list says, of ones for those that have, or all
    but every n-th."""
    if f.values.get(_ROTATED):
        listed = read_types(f, _ROTATED, 0, 1)
        return lambda i: bool(listed and listed[i])
    every = f.whole("no_rope_layer_interval", high=MAX_LAYERS)
    return lambda i: bool((i + 1) % every)


def _chunked_layers(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells whether a layer attends within chunks: those that a list names, or else all with
    positions."""
    types = read_types(f, "layer_types", FULL, _CHUNKED)
    return _rotated_layers(f) if types is None else lambda i: types[i] == _CHUNKED


def _sparse_layers(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells whether a layer has experts: those of a list, or every n-th."""
    listed = read_numbers(f, _SPARSE)
    if listed is None:
        step = f.whole(_STEP, high=MAX_LAYERS)
        return lambda i: not (i + 1) % step
    return lambda i: i in listed


def _sparse(f: Fields) -> SparseMlp:
    """Reads the experts. Their one weight is 1: the router's score is the gate of what they read."""
    routing = read_routing(f, normalize=True)
    f.require("num_experts_per_tok", routing.top_k, 1)
    hidden, width = f.whole("hidden_size"), f.whole("intermediate_size")
    made = SparseMlp(hidden, width, routing, shared_width=width, names=_NAMES)
    return replace(made, gated_input=True)
