"""Mixtral and MiniMax-M2."""

import torch
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}


def corrected(_: object, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
    """The correction is an input of MiniMax's router."""
    return logits.sigmoid() + inputs[1]


CASES = (
    Case("mixtral", "mixtral", "Mixtral", _BASE),
    Case(
        "minimax-m2",
        "minimax_m2",
        "MiniMaxM2",
        {**_BASE, "head_dim": 24, "rotary_dim": 12},
        hub={
            "partial_rotary_factor": None,
            "rotary_dim": 12,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        choice=corrected,
    ),
)
