"""Phi-3.5-MoE: SparseMixer, LayerNorms with biases, LongRoPE with factors of cos and sin."""

from pathlib import Path
from typing import Any

import torch
from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 10,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "lm_head_bias": True,
    "sliding_window": None,
}


def _choice(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits


def _edges(router: Any, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """To another order of the chosen, and to where an expert begins to share a weight."""
    first, second = (logits.gather(1, best[:, k : k + 1]) for k in (0, 1))
    gaps = [first - second]
    for top in (first, second):
        size = logits.abs().maximum(top)
        to_edge = (top - logits - 2 * router.router_jitter_noise * size).abs()
        gaps.append(to_edge.scatter(1, best, float("inf")))
    gaps.append(
        (first - second - 2 * router.router_jitter_noise * first.maximum(second.abs())).abs()
    )
    return torch.cat(gaps, 1).min(1).values.float()


def _decided(folder: Path) -> None:
    """Routers that decide."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("gate.weight"):
            tensors[name] *= 4
    save_file(tensors, path, metadata={"format": "pt"})


CASES = (
    Case(
        "phi-3.5-moe",
        "phimoe",
        "Phimoe",
        {
            **_BASE,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0 + i / 20 for i in range(10)],
                "long_factor": [1.5 + i for i in range(10)],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
        router="mlp.router",
        choice=_choice,
        edges=_edges,
        publish=_decided,
        seed=3,
        thorough=True,
    ),
    # A band so wide that mostly several share a weight, a window, no biases but the norms'.
    Case(
        "phimoe-window",
        "phimoe",
        "Phimoe",
        {
            **_BASE,
            "attention_bias": False,
            "lm_head_bias": False,
            "sliding_window": 21,
            "router_jitter_noise": 0.3,
        },
        router="mlp.router",
        choice=_choice,
        edges=_edges,
        publish=_decided,
        seed=1,
    ),
)
