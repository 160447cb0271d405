"""Ling and Ring, 1.5 (lite, plus: softmax scores) and 2 (mini, flash, 1T: q/k norms, half of each head is rotated,
DeepSeek-V3's experts).

transformers 5.23 has neither. Sources: the reports of Ling and Ling 2.0; the publisher's code; llama.cpp and mlx-lm.
Layers for multi-token prediction are not read.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.grouped_query import GqaNames, QkNorms
from ktcli.layers.names import CorrectionNames, RouterNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import (
    V3_EXPERTS,
    read_corrected_routing,
    read_mlps,
    read_routing,
    read_sparse,
)
from ktcli.models.model import Model
from ktcli.models.pattern import cut_first_dense, read_first_dense
from ktcli.models.skeleton import Prefixes, assemble

_FIRST, _SECOND = "bailing_moe", "bailing_moe_v2"
# No class of transformers says what is meant by a field that is left out; these are the publisher's.
MODEL_TYPES: Defaults = {
    _FIRST: {"score_function": "softmax", "use_qk_norm": False, "n_shared_experts": 0},
    _SECOND: {**V3_EXPERTS, "score_function": "sigmoid", "use_qk_norm": True},
}

_PREFIXES = Prefixes(attention="attention", embedding="word_embeddings")
_PROJECTIONS = GqaNames(o="dense", fused="query_key_value")
_QK_NORMS = QkNorms(names=("query_layernorm", "key_layernorm"))
_NAMES = SparseNames(router=RouterNames(correction=CorrectionNames("gate.expert_bias")))
# Fields of which one value is known.
_ONLY = {
    "attention_bias": False,
    "moe_router_enable_routed_scaling": True,
    "moe_router_enable_shared_expert": True,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "use_bias": False,
    "use_sliding_window": False,
}

cut = cut_first_dense


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only(_ONLY)
    sparse = _experts(f)
    width = f.whole("moe_shared_expert_intermediate_size", default=sparse.width)
    f.require("moe_shared_expert_intermediate_size", width, sparse.width)
    norms = _QK_NORMS if f.flag("use_qk_norm", False) else None
    read = read_gqa(f, norms=norms, qkv_bias=f.flag("use_qkv_bias", False), partly=True)
    attention = replace(read, projections=_PROJECTIONS)
    first = read_first_dense(f)
    mlp = read_mlps(f, sparse, lambda i: i < first)
    return assemble(f, "bailing_moe", lambda i: (attention, mlp(i)), _PREFIXES)


def _experts(f: Fields) -> SparseMlp:
    """Reads the experts, by whose scores the versions differ: published configs of both have either model_type."""
    score = f.text("score_function", "")
    f.require("score_function", score, "softmax", "sigmoid")
    has_bias = score == "sigmoid"
    f.only({"moe_router_enable_expert_bias": has_bias})
    if not has_bias:
        return read_sparse(f, read_routing(f, normalize=True))
    return read_sparse(f, read_corrected_routing(f), correction=True, names=_NAMES)
