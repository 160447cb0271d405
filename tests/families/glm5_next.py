"""The text part of GLM-5.3: decays of each channel, windows of positions that are chosen, several streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"

_TEXT = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.0,
    "linear_head_dim": 20,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "index_n_heads": 9,  # so many that no two scores are zero, whose order nothing defines
    "index_head_dim": 14,
    "index_kpool": 8,
    "index_topk": 72,  # 9 of 18 windows: into the second page of what is gathered
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "layer_types": [_LINEAR, _INDEXED, _INDEXED, _LINEAR],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}


def _with_vision(**text: Any) -> dict[str, Any]:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision |= {"out_hidden_size": 80, "projection_intermediate_size": 16}
    return {"text_config": {**_TEXT, **text}, "vision_config": vision}


def _publish(folder: Path) -> None:
    """The output of attention is smaller, as in trained models."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class _Nested(Case):
    """The hub has the sizes of linear attention in a part of their own, and other words for layers."""

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        linear = {
            "head_dim": config.pop("linear_head_dim"),
            "num_heads": config.pop("linear_num_heads"),
            "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
            "gate_lower_bound": config["linear_lower_bound"],
            "safe_gate": config.pop("linear_lower_bound") is not None,
        }
        letters = "".join(kind[0].upper() for kind in config.pop("indexer_types"))
        kinds = [kind.replace("indexed", "deepseek_sparse") for kind in config["layer_types"]]
        config |= {"linear_attn_config": linear, "layer_types": kinds}
        return {**config, "index_topk_pattern": letters, "eos_token_id": [1, 2]}


_USUAL: dict[str, Any] = {"publish": _publish, "task": "ForConditionalGeneration"}

CASES = (
    _Nested(
        "glm-5.3",
        "glm5_next",
        "Glm5Next",
        _with_vision(),
        seed=15,
        fast_error=0.05,  # 0.015 at the median position: a choice of experts or windows moves what comes later
        **_USUAL,
    ),
    # Windows as published; a decay without a bound; layers and rates by rule.
    _Nested(
        "glm-5.3-unbounded",
        "glm5_next",
        "Glm5Next",
        _with_vision(
            index_kpool=4,
            linear_lower_bound=None,
            layer_types=None,
            indexer_types=None,
            mlp_layer_types=None,
            num_hidden_layers=4,
            linear_head_dim=24,
            linear_conv_kernel_dim=4,
            hc_mult=2,
        ),
        **_USUAL,
    ),
)
