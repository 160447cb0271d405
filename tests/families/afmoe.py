"""Trinity."""

from families.case import COMMON, Case
from families.mixtral import corrected

CASES = (
    Case(
        "trinity",
        "afmoe",
        "Afmoe",
        {
            **COMMON,
            "num_hidden_layers": 5,
            "num_dense_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 13,  # much less than the text
            "moe_intermediate_size": 40,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "route_scale": 1.3,
            "mup_enabled": True,
            "max_position_embeddings": 512,
        },
        router="mlp.router",
        choice=corrected,
    ),
)
