"""LFM2-MoE (8B-A1B): most layers are gated short convolutions, the others grouped-query attention with q/k norms;
experts by sigmoid scores with a learned correction.

Source: the LFM2 report, arXiv 2511.23404; transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import GqaNames, QkNorms
from ktcli.layers.names import NUMBERED_EXPERTS, CorrectionNames, MlpNames, RouterNames, SparseNames
from ktcli.layers.short_conv import ShortConv
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_dense, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_first_dense, read_types
from ktcli.models.skeleton import Prefixes, assemble
from ktcli.ops.table.experts import Score

MODEL_TYPES: Defaults = {
    "lfm2_moe": {
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    }
}

_CONV, _FULL = "conv", "full_attention"
_DENSE = "num_dense_layers"
_PREFIXES = Prefixes(mlp="feed_forward", norms=("operator_norm", "ffn_norm"), norm="embedding_norm")
_MLP = MlpNames("w1.weight", "w3.weight", "w2.weight")
_NAMES = SparseNames(NUMBERED_EXPERTS, RouterNames(correction=CorrectionNames("expert_bias")))
_QK_NORMS = QkNorms(names=("q_layernorm", "k_layernorm"))


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    f.only({"conv_bias": False, "use_expert_bias": True})
    attention = replace(read_gqa(f, norms=_QK_NORMS), projections=GqaNames("out_proj"))
    conv = ShortConv(attention.hidden, f.whole("conv_L_cache", low=2, high=16), source="conv")
    dense, first = replace(read_dense(f), names=_MLP), read_first_dense(f, _DENSE)
    # A model without experts, as GGUF files have it, is one with dense layers only.
    others = _sparse(f) if first < f.n_layers else dense
    kinds = read_types(f, "layer_types", _CONV, _FULL)
    if kinds is None:
        raise BadCheckpoint(f"{f.where}: layer_types is missing or null")

    def parts(i: int) -> tuple[Attention, Mlp]:
        return conv if kinds[i] == _CONV else attention, dense if i < first else others

    return assemble(f, "lfm2_moe", parts, _PREFIXES)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts if there are any.
    """
    first, n_layers = read_first_dense(f, _DENSE), f.n_layers
    kept = min(first, layers - 1) if first < n_layers else first
    return {**cut_layers(f, layers), _DENSE: kept}


def _own(f: Fields) -> Fields:
    """Returns the fields of a config, with the usual names of some."""
    tied = f.flag("tie_embedding", f.flag("tie_word_embeddings", True))
    eps = f.number("norm_eps", high=1.0)
    return Fields({**f.values, "rms_norm_eps": eps, "tie_word_embeddings": tied}, f.where)


def _sparse(f: Fields) -> SparseMlp:
    """Reads the experts."""
    normalize, scale = f.flag("norm_topk_prob", False), "routed_scaling_factor"
    routing = read_routing(f, normalize=normalize, score=Score.SIGMOID, scale=scale)
    return read_sparse(f, routing, correction=True, names=_NAMES)
