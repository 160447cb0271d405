"""MiniMax-Text-01 and M1: lightning attention."""

from pathlib import Path
from typing import Any

import torch
from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_FULL, _LINEAR = "full_attention", "linear_attention"
_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
    "max_position_embeddings": 512,
    "block_size": 16,
    "full_attn_alpha_factor": 1.9,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 0.9,
    "mlp_alpha_factor": 1.7,
    "mlp_beta_factor": 1.1,
}


def _publish(folder: Path) -> None:
    """The hub's has no decays, which follow from the config; transformers writes them, rounded."""
    path = folder / "model.safetensors"
    decays = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    kept = {name: value for name, value in load_file(path).items() if not name.endswith(decays)}
    save_file(kept, path, metadata={"format": "pt"})


def _choice(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits


CASES = (
    Case(
        "minimax-m1", "minimax", "MiniMax", _BASE, choice=_choice, publish=_publish, thorough=True
    ),
    # Every second layer, no factors.
    Case(
        "minimax-alternating",
        "minimax",
        "MiniMax",
        {
            **{name: value for name, value in _BASE.items() if "factor" not in name},
            "layer_types": None,
            "num_local_experts": 4,
            "num_attention_heads": 6,
        },
        choice=_choice,
        publish=_publish,
    ),
)
