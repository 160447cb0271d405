"""DeepSeek-V3.2 and GLM-5: latent attention over chosen positions."""

from families.case import COMMON, YARN, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "index_topk": 70,  # of 150 positions: into the second page of what is gathered
    "index_head_dim": 26,
    "index_n_heads": 9,
}
_PUBLISHED = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "mlp_layer_types": None,
    "layer_types": None,
}

CASES = (
    Case(
        "deepseek-v3.2",
        "deepseek_v32",
        "DeepseekV32",
        {
            **_BASE,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        hub=_PUBLISHED,
        fast_error=0.08,
    ),
    Case(
        "glm-5",
        "glm_moe_dsa",
        "GlmMoeDsa",
        {**_BASE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        hub={**_PUBLISHED, "indexer_types": None, "index_topk_pattern": "FSFS"},
        seed=4,
        fast_error=0.08,
    ),
)
