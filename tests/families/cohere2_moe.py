"""Command A+: attention and experts side by side."""

from typing import Any

import torch
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "sliding_window": 13,
    "sliding_window_pattern": 3,
    "logit_scale": 0.25,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def _choice(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits


CASES = (
    Case(
        "command-a-plus",
        "cohere2_moe",
        "Cohere2Moe",
        {**_BASE, "num_shared_experts": 2, "first_k_dense_replace": 1},
        choice=_choice,
        thorough=True,
    ),
    Case(
        "command-a-plus-rms",
        "cohere2_moe",
        "Cohere2Moe",
        {
            **_BASE,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
            "expert_selection_fn": "sigmoid",
            "prefix_dense_intermediate_size": 56,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
        },
        choice=_choice,
        seed=1,
    ),
)
