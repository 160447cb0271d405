"""Mellum2."""

from families.case import COMMON, YARN, OwnRotations

CASES = (
    OwnRotations(
        "mellum",
        "mellum",
        "Mellum",
        {
            **COMMON,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 13,  # much less than the text
            "moe_intermediate_size": 40,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        seed=4,
    ),
)
