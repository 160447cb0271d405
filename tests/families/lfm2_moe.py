"""LFM2-MoE: gated short convolutions."""

from typing import Any

import torch
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "max_position_embeddings": 512,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "tie_word_embeddings": False,
}


def _corrected(_: Any, inputs: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    return logits.sigmoid() + inputs[1]


CASES = (
    Case(
        "lfm2-moe",
        "lfm2_moe",
        "Lfm2Moe",
        _BASE,
        router="feed_forward.gate",
        choice=_corrected,
        thorough=True,
    ),
)
