"""Qwen3-MoE (30B-A3B, 235B-A22B; the text of Qwen3-VL): q/k norms, softmax top-k experts.

Source: the Qwen3 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import USUAL_SPARSE, EachExpert, FusedExperts, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CONTEXT, TEXT, Fields
from ktcli.models.feedforward import read_dense, read_softmax_routing, read_sparse
from ktcli.models.model import DecoderModel
from ktcli.models.pattern import cut_listed_dense, read_listed_dense
from ktcli.models.skeleton import USUAL_PREFIXES, Prefixes, assemble, text_part

# Qwen3-VL keeps its experts in two tensors per layer, transposed.
_VISION = "qwen3_vl_moe"
MODEL_TYPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    _VISION: {
        "tie_word_embeddings": False,
        TEXT: {"num_key_value_heads": 16, "rope_theta": 500_000.0},
    },
}

_VISION_PREFIXES = Prefixes("model.language_model", ignored=("model.visual.*",))
_VISION_NAMES = SparseNames((EachExpert(), FusedExperts(across=True)))


def build(config: Mapping[str, Any]) -> DecoderModel:
    """Returns the model that a config describes, without weights."""
    has_vision = _has_vision(config)
    f = text_part(config, f"{_VISION}_text") if has_vision else Fields(config)
    sliding = not has_vision and f.flag("use_sliding_window", False) and f.has("sliding_window")
    window = f.whole("sliding_window", high=MAX_CONTEXT) if sliding else 0
    bias = f.flag("attention_bias", False)
    attention = read_gqa(f, norms=QkNorms(), qkv_bias=bias, o_bias=bias)
    routing = read_softmax_routing(f, normalize=has_vision or f.flag("norm_topk_prob", False))
    sparse = read_sparse(f, routing, names=_VISION_NAMES if has_vision else USUAL_SPARSE)
    is_dense = read_listed_dense(f)
    prefixes = _VISION_PREFIXES if has_vision else USUAL_PREFIXES

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attention.within(window), read_dense(f) if is_dense(i) else sparse

    return assemble(f, "qwen3_moe", parts, prefixes)


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config with only its first `layers` layers, the last of them with experts."""
    if not _has_vision(config):
        return cut_listed_dense(config, layers)
    return {**config, TEXT: cut_listed_dense(config[TEXT], layers)}


def _has_vision(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == _VISION
