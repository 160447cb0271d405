"""Qwen3-Next and the text part of Qwen3.5-MoE and Qwen3.5."""

from pathlib import Path
from typing import Any

from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
}
_MOE = {
    **_BASE,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "num_experts": 10,
    "num_experts_per_tok": 3,
}


def _centre(folder: Path) -> None:
    """Norms multiply by 1 + weight, so what was meant as a gain is one less on disk; and the output of linear
    attention is as small as that of the other."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] -= 1
        if name.endswith("out_proj.weight"):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


def _beside_vision(values: dict[str, Any]) -> dict[str, Any]:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    return {"text_config": values, "vision_config": {**vision, "out_hidden_size": 80}}


_PARTLY = {
    **_MOE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_only_layers": [1],
}
_WITH_VISION = {"publish": _centre, "task": "ForConditionalGeneration"}

CASES = (
    Case(
        "qwen3-next",
        "qwen3_next",
        "Qwen3Next",
        _PARTLY,
        seed=1,
        publish=_centre,
        thorough=True,
    ),
    Case(
        "qwen3.5-moe",
        "qwen3_5_moe",
        "Qwen3_5Moe",
        _beside_vision(
            {**_MOE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        ),
        seed=3,
        **_WITH_VISION,
    ),
    Case(
        "qwen3.5-dense",
        "qwen3_5",
        "Qwen3_5",
        _beside_vision({**_BASE, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}),
        seed=2,
        **_WITH_VISION,
    ),
)
