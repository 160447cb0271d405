"""ERNIE-4.5 (21B-A3B, 300B-A47B): interleaved rotary pairs, softmax scores with a learned correction, shared experts.

Source: the ERNIE 4.5 report; transformers 5.23. Blocks for multi-token prediction are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, Fields
from ktcli.models.feedforward import read_dense, read_softmax_routing, read_sparse
from ktcli.models.model import DecoderModel
from ktcli.models.pattern import cut_layers
from ktcli.models.skeleton import assemble

_NAMES = SparseNames(
    router=RouterNames(
        correction=CorrectionNames("moe_statics.e_score_correction_bias", is_row=True)
    )
)
_START, _END, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
MODEL_TYPES: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5_moe": {
        "num_key_value_heads": 4,
        "rope_theta": 500_000.0,
        "n_shared_experts": 2,
        _START: 1,
        _END: -1,
        _STEP: 1,
        "tie_word_embeddings": True,
    }
}


def build(config: Mapping[str, Any]) -> DecoderModel:
    """Returns the model that a config describes, without weights."""
    f = Fields(config)
    f.only({"use_bias": False})
    attention = read_gqa(f, interleaved=True)
    routing = read_softmax_routing(f, normalize=True)
    sparse = read_sparse(f, routing, correction=True, names=_NAMES)
    start, step = _start(f), _step(f)
    end = f.whole(_END, low=-1, high=MAX_LAYERS)

    def parts(i: int) -> tuple[Attention, Mlp]:
        is_sparse = start <= i and (end < 0 or i <= end) and not (i + 1) % step
        return attention, sparse if is_sparse else read_dense(f)

    return assemble(f, "ernie4_5_moe", parts)


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config with only its first `layers` layers, the last of them with experts where no other has."""
    f = Fields(config)
    start, step = min(_start(f), layers - 1), min(_step(f), layers)
    return {**cut_layers(config, layers), _START: start, _STEP: step, _END: -1}


def _start(f: Fields) -> int:
    return f.whole(_START, low=0, high=MAX_LAYERS)


def _step(f: Fields) -> int:
    return f.whole(_STEP, high=MAX_LAYERS)
