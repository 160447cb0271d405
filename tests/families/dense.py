"""Llama, Mistral, Qwen2 and Qwen3 without experts, and beside vision."""

from pathlib import Path

import torch
from families.case import COMMON, Case
from families.qwen3_moe import VISION
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_WINDOWS = {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}


def _add_head(folder: Path) -> None:
    """A head of its own, although the config calls it the embedding: transformers unties them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = torch.randn(tensors["model.embed_tokens.weight"].shape) / 9
    tensors["lm_head.weight"] = head.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


CASES = (
    Case(
        "llama",
        "llama",
        "Llama",
        {**_BASE, "rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    Case("mistral", "mistral", "Mistral", {**_BASE, "head_dim": 24, "sliding_window": 40}),
    Case("qwen2", "qwen2", "Qwen2", {**_BASE, "tie_word_embeddings": True}, publish=_add_head),
    Case("qwen3-dense", "qwen3", "Qwen3", {**_BASE, "head_dim": 24, **_WINDOWS}),
    Case(
        "qwen3-vl-dense",
        "qwen3_vl",
        "Qwen3VL",
        {
            "text_config": {
                **_BASE,
                "head_dim": 24,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
            },
            "vision_config": VISION,
            "tie_word_embeddings": True,
        },
        task="ForConditionalGeneration",
    ),
)
