"""Granite-MoE, with a shared expert, and with windows."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "intermediate_size": 40,  # of an expert
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
_NEAR = {
    **_BASE,
    "num_hidden_layers": 5,
    "sliding_window": 13,  # much less than the text
    "layer_rope_theta": [0, 1e4, 5e5, 1e4, 1e4],
}


def _choice(router, _, logits):
    return logits


CASES = (
    Case(
        "granitemoe",
        "granitemoe",
        "GraniteMoe",
        _BASE,
        router="block_sparse_moe.router",
        choice=_choice,
    ),
    Case(
        "granitemoe-shared",
        "granitemoeshared",
        "GraniteMoeShared",
        {
            **_BASE,
            "shared_intermediate_size": 56,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        router="block_sparse_moe.router",
        choice=_choice,
    ),
    Case(
        "granitemoe-swa",
        "granitemoe_swa",
        "GraniteMoeSWA",
        _NEAR,
        router="block_sparse_moe.router",
        choice=_choice,
    ),
)
