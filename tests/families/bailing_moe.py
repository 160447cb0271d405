"""Ling 1.5 and 2, which transformers lacks: GLM-4.5's class computes the same, under other names."""

import json
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from families.case import COMMON, Case
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
_RENAMED = {
    "embed_tokens": "word_embeddings",
    "self_attn.": "attention.",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "o_proj": "dense",
    "e_score_correction_bias": "expert_bias",
}
_OWN = "transformers"  # a folder of the checkpoint under transformers' names


class _Glm(Glm4MoeForCausalLM):
    """The model that transformers wrote."""

    __module__ = Glm4MoeForCausalLM.__module__  # else it does not know the names of experts

    @classmethod
    def from_pretrained(cls, folder: Path, **how: Any) -> Any:
        return super().from_pretrained(folder / _OWN, **how)


class _Softmax(_Glm):
    """The first version chooses by softmax, and has no correction."""

    __module__ = Glm4MoeForCausalLM.__module__

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.forward = _by_softmax(layer.mlp.gate)


def _by_softmax(gate: Any) -> Any:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = x.reshape(-1, x.shape[-1]).float() @ gate.weight.float().T
        best = logits.softmax(-1).topk(gate.top_k, -1)
        return logits, best.values / best.values.sum(-1, keepdim=True), best.indices

    return forward


def _said(config: dict[str, Any], score: str) -> dict[str, Any]:
    """The config in the publisher's words."""
    kept = {name: value for name, value in config.items() if name != "attention_bias"}
    return {**kept, "score_function": score, "use_qkv_bias": config["attention_bias"]}


def _publish(folder: Path, score: str = "sigmoid") -> None:
    """The publisher's names, and one projection to q, k and v."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    copytree(folder, folder.with_name(_OWN))
    folder.with_name(_OWN).rename(folder / _OWN)
    config = folder / "config.json"
    config.write_text(json.dumps(_said(json.loads(config.read_text()), score)))
    made = {}
    for name, value in tensors.items():
        place, _, end = name.rpartition("q_proj.")
        if place:
            value = torch.cat([tensors[f"{place}{of}_proj.{end}"] for of in "qkv"])
            name = f"{place}query_key_value.{end}"
        elif "k_proj." in name or "v_proj." in name:
            continue
        for own, hub in _RENAMED.items():
            name = name.replace(own, hub)
        made[name] = value
    save_file(made, path, metadata={"format": "pt"})


def _publish_first(folder: Path) -> None:
    _publish(folder, "softmax")
    path = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if "expert_bias" not in name}
    save_file(kept, path, metadata={"format": "pt"})


def _choice(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits


@dataclass(frozen=True)
class _Ling(Case):
    first: bool = False
    borrowed: bool = True

    @property
    def model_class(self) -> Any:
        return _Softmax if self.first else _Glm

    def own_spelling(self) -> dict[str, Any]:
        return _said(super().own_spelling(), "softmax" if self.first else "sigmoid")


_HUB = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_USUAL = {"renamed": {own: hub for hub, own in _HUB.items()}}

CASES = (
    _Ling(
        "ling-2",
        "bailing_moe_v2",
        "Glm4Moe",
        {**_BASE, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        publish=_publish,
        seed=1,  # with 0 a router decided by 0.016 chose otherwise on avx2 and portable
        **_USUAL,
    ),
    _Ling(
        "ling-1.5",
        "bailing_moe",
        "Glm4Moe",
        {
            **_BASE,
            "n_shared_experts": 2,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
            "first_k_dense_replace": 0,
        },
        publish=_publish_first,
        choice=_choice,
        first=True,
        **_USUAL,
    ),
)
