"""Qwen3-MoE."""

from functools import partial
from pathlib import Path

from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}

_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 80,
    "deepstack_visual_indexes": [0],
}


def turn_experts(folder: Path) -> None:
    """The hub has these tensors of all experts as [E, in, out]; transformers reads them so, too."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


_case = partial(Case, renamed={"num_local_experts": "num_experts"})

CASES = (
    _case("qwen3", "qwen3_moe", "Qwen3Moe", _BASE, seed=2, thorough=True),
    _case(
        "qwen3-yarn-bias-unnormalised",
        "qwen3_moe",
        "Qwen3Moe",
        {
            **_BASE,
            "rope_parameters": YARN,
            "attention_bias": True,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    _case(
        "qwen3-tied-dense-layer",
        "qwen3_moe",
        "Qwen3Moe",
        {**_BASE, "tie_word_embeddings": True, "mlp_only_layers": [1]},
        seed=1,
    ),
    Case(
        "qwen3-vl",
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        {
            "text_config": {
                **{name: value for name, value in _BASE.items() if name != "norm_topk_prob"},
                "moe_intermediate_size": 24,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
            },
            "vision_config": _VISION,
            "tie_word_embeddings": False,
        },
        task="ForConditionalGeneration",
        publish=turn_experts,
        seed=4,
    ),
)
