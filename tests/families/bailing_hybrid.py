"""Ling 3: Kimi Delta Attention with whole projections, latent attention with a gate for each head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BailingHybridForCausalLM

_LINEAR, _FULL = "linear_attention", "full_attention"

_VALUES = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "head_dim": 20,
    "short_conv_kernel_size": 3,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 14,
    "v_head_dim": 22,
    "moe_intermediate_size": 40,
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": 2,
}
_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
# transformers overwrites the width of linear attention's heads with that of the rotation.
_HUB = {
    "head_dim": 20,
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_shared_expert_intermediate_size": 40,
    "no_kda_lora": True,
    "rope_interleave": True,
    "score_function": "sigmoid",
    **dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")),
}


def _calm(folder: Path) -> None:
    """The output of attention is smaller, as in trained models."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("dense.weight"):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


def _publish(folder: Path) -> None:
    """The hub's last projection of linear attention has another name than that of latent attention."""
    _calm(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors):
        head, end, _ = name.rpartition("dense.weight")
        if end and f"{head}A_log" in tensors:
            tensors[f"{head}o_proj.weight"] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})


class _Tiny(BailingHybridForCausalLM):
    """Ling-3.0-tiny has a query latent, which transformers' model lacks."""

    __module__ = BailingHybridForCausalLM.__module__  # else it does not know the hub's names

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if layer.block_type == _FULL:
                _compress(layer.self_attn, config.q_lora_rank)


def _compress(attention: Any, rank: int) -> None:
    width, hidden = attention.q_proj.weight.shape
    attention.q_a_proj = nn.Linear(hidden, rank, bias=False)
    attention.q_a_layernorm = type(attention.kv_a_layernorm)(rank)
    attention.q_b_proj = nn.Linear(rank, width, bias=False)
    del attention.q_proj
    attention.q_proj = lambda x: attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))


@dataclass(frozen=True)
class _WithLatent(Case):
    @property
    def model_class(self) -> Any:
        return _Tiny


CASES = (
    Case(
        "ling-3",
        "bailing_hybrid",
        "BailingHybrid",
        _VALUES,
        hub={**_HUB, "layer_types": None, "mlp_layer_types": None},
        renamed=_RENAMED,
        publish=_publish,
    ),
    # A decay without a bound, layers by lists, names as transformers writes them.
    _WithLatent(
        "ling-3-tiny",
        "bailing_hybrid",
        "BailingHybrid",
        {
            **_VALUES,
            "q_lora_rank": 36,
            "kda_safe_gate": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "short_conv_kernel_size": 4,
            "layer_types": [_LINEAR, _FULL, _FULL, _LINEAR],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "rope_parameters": YARN,
        },
        hub=_HUB,
        renamed=_RENAMED,
        seed=8,
        publish=_calm,
    ),
)
