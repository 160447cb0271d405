"""GLM-4.5 and -Air."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "attention_bias": True,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}

CASES = (
    Case("glm4-moe", "glm4_moe", "Glm4Moe", {**_BASE, "use_qk_norm": True}),
    Case("glm4-moe-air", "glm4_moe", "Glm4Moe", {**_BASE, "n_group": 4, "topk_group": 2}),
)
