"""Qwen2-MoE."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}

CASES = (
    Case("qwen2-moe", "qwen2_moe", "Qwen2Moe", _BASE, seed=1, thorough=True),
    Case(
        "qwen2-moe-sparse-step",
        "qwen2_moe",
        "Qwen2Moe",
        {
            **_BASE,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 2,
        },
        seed=1,
        hub={"layer_types": None},
    ),
)
