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
_SEEING = "qwen3_vl_moe"
MODEL_TYPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    _SEEING: {
        "tie_word_embeddings": False,
        TEXT: {"num_key_value_heads": 16, "rope_theta": 500_000.0},
    },
}

_SEEING_PREFIXES = Prefixes("model.language_model", ignored=("model.visual.*",))
_SEEING_NAMES = SparseNames((EachExpert(), FusedExperts(across=True)))


def build(config: Mapping[str, Any]) -> DecoderModel:
    """Builds the model that a config describes."""
    sees = _sees(config)
    f = text_part(config, f"{_SEEING}_text") if sees else Fields(config)
    near = not sees and f.flag("use_sliding_window", False) and f.has("sliding_window")
    window = f.whole("sliding_window", high=MAX_CONTEXT) if near else 0
    bias = f.flag("attention_bias", False)
    attention = read_gqa(f, norms=QkNorms(), qkv_bias=bias, o_bias=bias)
    routing = read_softmax_routing(f, normalize=sees or f.flag("norm_topk_prob", False))
    sparse = read_sparse(f, routing, names=_SEEING_NAMES if sees else USUAL_SPARSE)
    is_dense = read_listed_dense(f)
    prefixes = _SEEING_PREFIXES if sees else USUAL_PREFIXES

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attention.within(window), read_dense(f) if is_dense(i) else sparse

    return assemble(f, "qwen3_moe", parts, prefixes)


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config with only its first layers, the last of them with experts."""
    if not _sees(config):
        return cut_listed_dense(config, layers)
    return {**config, TEXT: cut_listed_dense(config[TEXT], layers)}


def _sees(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == _SEEING
