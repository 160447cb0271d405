"""ERNIE-4.5 (21B-A3B, 300B-A47B; the text of VL-28B-A3B and VL-424B-A47B): interleaved rotary pairs, softmax scores
with a learned correction, shared experts.

Models that see have experts of their own for pictures, numbered on behind those for text, and list sizes for both.
Sources: the ERNIE 4.5 report; transformers 5.23, which nests the text model's config in one of another model_type than
the publisher's. Blocks for multi-token prediction are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, TEXT, Defaults, Fields
from ktcli.models.feedforward import read_dense, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, cut_typed_dense, read_mlp_types
from ktcli.models.skeleton import USUAL_PREFIXES, assemble, text_part

_PLAIN, _NESTED, _VISION = "ernie4_5_moe", "ernie4_5_vl_moe", "ernie4_5_moe_vl"
_START, _END, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
_USUAL = {
    "num_key_value_heads": 4,
    "rope_theta": 500_000.0,
    "n_shared_experts": 2,
    _START: 1,
    _END: -1,
    _STEP: 1,
    "tie_word_embeddings": True,
}
_SEEING = {**_USUAL, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": [1536, 512]}
MODEL_TYPES: Defaults = {
    _PLAIN: _USUAL,
    _NESTED: {"tie_word_embeddings": True, TEXT: _SEEING},
    _VISION: _SEEING,
}

# Of these there may be lists: first for text, then for pictures.
_LISTED = ("moe_num_experts", "moe_intermediate_size", _START, _END)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    kind = str(f.values["model_type"])
    f = _text(f)
    f.only({"use_bias": False})
    attention = read_gqa(f, interleaved=True)
    routing = read_routing(f, normalize=True)
    sees = kind != _PLAIN
    correction = CorrectionNames("moe_statics.e_score_correction_bias", rows=1 + sees)
    router = RouterNames(correction=correction, across=sees)
    sparse = read_sparse(f, routing, correction=True, names=SparseNames(router=router))
    is_sparse = _sparse_layers(f)
    # Experts for pictures follow those for text.
    others = (f"*.mlp.experts.{routing.experts + e}.*" for e in range(routing.experts))
    apart = ("*.mlp.gate.weight_1", "*vision_model.*", "model.resampler_model.*", *others)
    prefixes = replace(USUAL_PREFIXES, ignored=apart) if sees else USUAL_PREFIXES

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attention, sparse if is_sparse(i) else read_dense(f)

    return assemble(f, "ernie4_5_moe", parts, prefixes)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, with dense layers reduced so
    that routed experts remain.
    """
    if f.values.get("mlp_layer_types") is not None:
        return cut_typed_dense(f, layers)
    own = _first_of_lists(f)
    start, step = min(_start(own), layers - 1), _step(own)
    if not any((i + 1) % step == 0 for i in range(start, layers)):
        step = 1
    return {**cut_layers(f, layers), _START: start, _STEP: step, _END: -1}


def _text(f: Fields) -> Fields:
    """Returns the fields of the text model, with the first number of each list of two."""
    if f.values["model_type"] == _NESTED:
        return _first_of_lists(text_part(f, f"{_NESTED}_text"))
    return _first_of_lists(f) if f.values["model_type"] == _VISION else f


def _first_of_lists(f: Fields) -> Fields:
    pairs = {n: f.values[n] for n in _LISTED if isinstance(f.values.get(n), list) and f.values[n]}
    return Fields({**f.values, **{name: pair[0] for name, pair in pairs.items()}}, f.where)


def _sparse_layers(f: Fields) -> Callable[[int], bool]:
    """Returns a function that tells whether a layer has experts: by the config's list of types, or else by numbers."""
    if (types := read_mlp_types(f)) is not None:
        return lambda i: types[i] == "sparse"
    start, step = _start(f), _step(f)
    end = f.whole(_END, low=-1, high=MAX_LAYERS)
    return lambda i: start <= i and (end < 0 or i <= end) and not (i + 1) % step


def _start(f: Fields) -> int:
    return f.whole(_START, low=0, high=MAX_LAYERS)


def _step(f: Fields) -> int:
    return f.whole(_STEP, high=MAX_LAYERS)
