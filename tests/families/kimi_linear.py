"""Kimi Linear: decays of each channel, latent attention without positions."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 14,
    "v_head_dim": 22,
    "moe_intermediate_size": 40,
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}


def _publish(folder: Path) -> None:
    """The hub's dense MLPs have a name of their own; the output of attention is smaller, as in trained models."""
    path = folder / "model.safetensors"
    tensors = {
        re.sub(r"block_sparse_moe(\.\w+_proj\.)", r"mlp\1", name): value
        for name, value in load_file(path).items()
    }
    for name in tensors:
        if name.endswith("self_attn.o_proj.weight"):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class _Apart(Case):
    """The hub has what is about linear attention in a part of its own."""

    def hub_spelling(self) -> dict[str, Any]:
        config = self.own_spelling()
        kinds = config.pop("layer_types")
        sparse = config.pop("mlp_layer_types")
        numbers = {kind: [i + 1 for i, one in enumerate(kinds) if one == kind] for kind in kinds}
        config["linear_attn_config"] = {
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
            "full_attn_layers": numbers["full_attention"],
            "kda_layers": numbers["linear_attention"],
        }
        return {**config, "first_k_dense_replace": sparse.index("sparse"), "mla_use_nope": True}


CASES = (_Apart("kimi-linear", "kimi_linear", "KimiLinear", _BASE, publish=_publish),)
