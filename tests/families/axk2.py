"""A.X K2: DeepSeek-V3.2 with gates on norms and on the heads' outputs."""

from families.case import COMMON, YARN, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 14,
    "v_head_dim": 22,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "gated_norm_rank": 6,
    "index_topk": 70,  # of 150 positions: into the second page of what is gathered
    "index_head_dim": 26,
    "index_n_heads": 9,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = (
    # As Light: experts in no groups, the first layer dense.
    Case(
        "ax-k2",
        "axk2",
        "AXK2",
        _BASE,
        hub={
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "mlp_layer_types": None,
            "layer_types": None,
        },
        fast_error=0.08,
        thorough=True,
    ),
    Case(
        "ax-k2-yarn",
        "axk2",
        "AXK2",
        {
            **_BASE,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        fast_error=0.08,
    ),
)
