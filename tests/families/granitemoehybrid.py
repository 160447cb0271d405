"""Granite 4: Mamba-2 and attention, with experts and a shared one, or with that alone."""

from pathlib import Path

from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_MAMBA, _FULL = "linear_attention", "full_attention"
_BASE = {
    **COMMON,
    "intermediate_size": 40,  # of an expert
    "num_hidden_layers": 4,
    "layer_types": [_MAMBA, _FULL, _MAMBA, _MAMBA],
    "num_key_value_heads": 2,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 56,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "max_position_embeddings": 512,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}


def _choice(router, _, logits):
    return logits


def _calm(folder: Path) -> None:
    """The output of Mamba-2 is smaller, as in trained models."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("out_proj.weight"):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


CASES = (
    Case(
        "granite-4-h",
        "granitemoehybrid",
        "GraniteMoeHybrid",
        _BASE,
        hub={
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "position_embedding_type": "nope",
            "time_step_limit": None,
        },
        router="block_sparse_moe.router",
        choice=_choice,
        publish=_calm,
    ),
    # No experts, rotated heads, the embedding as head.
    Case(
        "granite-4-h-dense",
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {
            **_BASE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
        },
        router="block_sparse_moe.router",
        choice=_choice,
        publish=_calm,
    ),
)
