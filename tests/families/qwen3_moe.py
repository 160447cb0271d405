"""Qwen3-MoE."""

from functools import partial

from families.case import COMMON, YARN, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}

_case = partial(Case, renamed={"num_local_experts": "num_experts"})

CASES = (
    _case("qwen3", "qwen3_moe", "Qwen3Moe", _BASE, seed=2, thorough=True),
    _case(
        "qwen3-yarn-bias-unnormalised",
        "qwen3_moe",
        "Qwen3Moe",
        {**_BASE, "rope_parameters": YARN, "attention_bias": True, "norm_topk_prob": False},
    ),
    _case(
        "qwen3-tied-dense-layer",
        "qwen3_moe",
        "Qwen3Moe",
        {**_BASE, "tie_word_embeddings": True, "mlp_only_layers": [1]},
        seed=1,
    ),
)
