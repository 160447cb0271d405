"""Laguna."""

from families.case import COMMON, YARN, OwnRotations

CASES = (
    OwnRotations(
        "laguna",
        "laguna",
        "Laguna",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_attention_heads_per_layer": [4, 6, 6, 4],
            "head_dim": 24,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "sliding_window": 13,  # much less than the text
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_routed_scaling_factor": 1.3,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
)
