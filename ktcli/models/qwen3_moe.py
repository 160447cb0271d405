"""Qwen3-MoE (30B-A3B, 235B-A22B; the text of Qwen3-VL and Qwen3-Omni): q/k norms, softmax top-k experts.

Source: the Qwen3 report; transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from ktcli.layers.grouped_query import QkNorms
from ktcli.layers.names import USUAL_SPARSE, EachExpert, FusedExperts, SparseNames
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_CONTEXT, TEXT, THINKER, Defaults, Fields
from ktcli.models.feedforward import read_mlps, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_listed_dense, read_listed_dense
from ktcli.models.skeleton import BESIDE_VISION, USUAL_PREFIXES, Prefixes, assemble, text_part

_MOE, _VISION, _OMNI = "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe"
MODEL_TYPES: Defaults = {
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


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    kind = str(f.values["model_type"])
    f = _text(f)
    sliding = kind == _MOE and f.flag("use_sliding_window", False) and f.has("sliding_window")
    window = f.whole("sliding_window", high=MAX_CONTEXT) if sliding else 0
    attention = read_gqa(f, norms=QkNorms(), biased=True)
    routing = read_routing(f, normalize=kind == _VISION or f.flag("norm_topk_prob", False))
    sparse = read_sparse(f, routing, names=_VISION_NAMES if kind == _VISION else USUAL_SPARSE)
    mlp = read_mlps(f, sparse, read_listed_dense(f))
    prefixes = _PREFIXES[kind]
    return assemble(f, "qwen3_moe", lambda i: (attention.within(window), mlp(i)), prefixes)


def _text(f: Fields) -> Fields:
    """Returns the fields of the text model, which are nested where the model sees or hears."""
    kind = str(f.values["model_type"])
    if kind == _MOE:
        return f
    thinker: Any = f.values.get(THINKER)
    outer = Fields(thinker, f"{f.where}: {THINKER}") if kind == _OMNI else f
    return text_part(outer, f"{kind}_text")
