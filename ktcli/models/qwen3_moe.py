"""Qwen3-MoE (30B-A3B, 235B-A22B; the text of Qwen3-VL and Qwen3-Omni): q/k norms, softmax top-k experts.

Source: the Qwen3 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import USUAL_SPARSE, EachExpert, FusedExperts, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CONTEXT, TEXT, THINKER, Fields
from ktcli.models.feedforward import read_dense, read_softmax_routing, read_sparse
from ktcli.models.model import DecoderModel
from ktcli.models.pattern import cut_listed_dense, read_listed_dense
from ktcli.models.skeleton import BESIDE_VISION, USUAL_PREFIXES, Prefixes, assemble, text_part

_MOE, _VISION, _OMNI = "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"
MODEL_TYPES: Mapping[str, Mapping[str, Any]] = {
    _MOE: {"num_key_value_heads": 4, "sliding_window": 4096},
    _VISION: {
        "tie_word_embeddings": False,
        TEXT: {"num_key_value_heads": 16, "rope_theta": 500_000.0},
    },
    _OMNI: {
        THINKER: {
            "tie_word_embeddings": False,
            TEXT: {"num_key_value_heads": 4, "rope_theta": 1e6, "norm_topk_prob": True},
        }
    },
}

cut = cut_listed_dense

# What speaks is left out, too.
_OMNI_PREFIXES = Prefixes(
    "thinker.model",
    "thinker.lm_head",
    ignored=("thinker.audio_tower.*", "thinker.visual.*", "talker.*", "code2wav.*"),
)
_PREFIXES = {_MOE: USUAL_PREFIXES, _VISION: BESIDE_VISION, _OMNI: _OMNI_PREFIXES}
# Qwen3-VL keeps its experts in two tensors per layer, transposed.
_VISION_NAMES = SparseNames((EachExpert(), FusedExperts(across=True)))


def build(config: Mapping[str, Any]) -> DecoderModel:
    """Returns the model that a config describes, without weights."""
    kind = str(config["model_type"])
    f = _text(config)
    sliding = kind == _MOE and f.flag("use_sliding_window", False) and f.has("sliding_window")
    window = f.whole("sliding_window", high=MAX_CONTEXT) if sliding else 0
    bias = f.flag("attention_bias", False)
    attention = read_gqa(f, norms=QkNorms(), qkv_bias=bias, o_bias=bias)
    routing = read_softmax_routing(f, normalize=kind == _VISION or f.flag("norm_topk_prob", False))
    sparse = read_sparse(f, routing, names=_VISION_NAMES if kind == _VISION else USUAL_SPARSE)
    is_dense = read_listed_dense(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attention.within(window), read_dense(f) if is_dense(i) else sparse

    return assemble(f, "qwen3_moe", parts, _PREFIXES[kind])


def _text(config: Mapping[str, Any]) -> Fields:
    """Returns the fields of the text model, which are nested where the model sees or hears."""
    kind = str(config["model_type"])
    if kind == _MOE:
        return Fields(config)
    thinker: Any = config.get(THINKER)
    outer = Fields(thinker, f"config.json: {THINKER}").values if kind == _OMNI else config
    return text_part(outer, f"{kind}_text")
