"""DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2 to 2.6, GLM-4.7-Flash: latent attention, shared expert, groups of experts.

V2 scores its experts by softmax and its groups by their best; V3 and Kimi-K2 by sigmoid with a learned
correction, groups by their two best. Sources: the DeepSeek-V2 and V3 reports; transformers 5.23.
A multi-token-prediction layer (number `num_hidden_layers`) in the checkpoint is not read.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.models.attention import read_mla
from ktcli.models.config import TEXT, Defaults, Fields
from ktcli.models.feedforward import (
    V3_EXPERTS,
    read_corrected_routing,
    read_dense,
    read_groups,
    read_mlps,
    read_routing,
    read_sparse,
)
from ktcli.models.model import Model
from ktcli.models.pattern import cut_typed_dense, read_typed_dense
from ktcli.models.skeleton import USUAL_PREFIXES, Prefixes, assemble, text_part
from ktcli.ops.table.experts import Routing

_V3 = {
    **V3_EXPERTS,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
}
MODEL_TYPES: Defaults = {
    "deepseek_v2": {
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "q_lora_rank": 1536,
        "first_k_dense_replace": 0,
        "rope_interleave": True,
    },
    "deepseek_v3": _V3,
    "glm4_moe_lite": {
        **V3_EXPERTS,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "first_k_dense_replace": 1,
        "rope_interleave": True,
    },
    "kimi_k2": _V3,
    "kimi_k25": {"tie_word_embeddings": True, TEXT: _V3},
}

cut = cut_typed_dense

# Kimi-K2.5 and 2.6 are vision-language models: their text model is a part of the config and of the checkpoint.
_TEXT_PREFIXES = Prefixes(
    "language_model.model", "language_model.lm_head", ignored=("*vision_tower.*", "*mm_projector.*")
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    is_part = f.values.get("model_type") == "kimi_k25"
    f = text_part(f, "deepseek_v3", "kimi_k2") if is_part else f
    v2, bias = f.text("model_type", "") == "deepseek_v2", f.flag("mlp_bias", False)
    if v2:
        f.only({"rope_interleave": True})
    else:
        f.require("mlp_bias", bias, False)
    attention = read_mla(f)
    routing = _v2_routing(f) if v2 else _v3_routing(f)
    sparse = replace(read_sparse(f, routing, correction=not v2), shared_bias=bias)
    mlp = read_mlps(f, sparse, read_typed_dense(f), read_dense(f, bias=bias))
    prefixes = _TEXT_PREFIXES if is_part else USUAL_PREFIXES
    return assemble(f, "deepseek", lambda i: (attention, mlp(i)), prefixes)


def _v2_routing(f: Fields) -> Routing:
    method = f.text("topk_method", "greedy")
    f.require("topk_method", method, "greedy", "group_limited_greedy")
    f.only({"scoring_func": "softmax"})
    # DeepSeek-V2's router never normalises, whatever its config says.
    routing = read_routing(f, normalize=False, scale="routed_scaling_factor")
    if method == "greedy":
        return routing
    n_group, topk_group = read_groups(f, routing)
    return replace(routing, n_group=n_group, topk_group=topk_group)


def _v3_routing(f: Fields) -> Routing:
    f.only({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    return read_corrected_routing(f)
