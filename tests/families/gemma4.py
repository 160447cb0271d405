"""Gemma 4: experts beside a dense MLP, keys as values; and a dense one under its vision model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from families.case import COMMON, OwnRotations
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "global_head_dim": 40,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 13,  # much less than the text
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
}
_SPARSE = {
    **_BASE,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 10,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
    "final_logit_softcapping": 3.0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 64,
}


def _probabilities(_: Any, __: tuple[Any, ...], chances: torch.Tensor) -> torch.Tensor:
    """The router returns no logits."""
    return chances


def _quiet(folder: Path) -> None:
    """Scores have no scale but these weights: as they were drawn, one position of all would count."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    quiet = {name: x / 4 if name.endswith("q_norm.weight") else x for name, x in tensors.items()}
    save_file(quiet, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class TwoHeads(OwnRotations):
    """The hub has the heads of each kind of layer, transformers those of each layer."""

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.cls.removesuffix("Text") + self.task)

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        given = self.values.get("text_config", self.values)
        del config["per_layer_config"]
        names = ("global_head_dim", "num_global_key_value_heads")
        return config | {name: given[name] for name in names if name in given}


CASES = (
    TwoHeads(
        "gemma4",
        "gemma4_text",
        "Gemma4Text",
        _SPARSE,
        seed=4,
        router="router",
        choice=_probabilities,
        publish=_quiet,
        thorough=True,
    ),
    TwoHeads(
        "gemma4-dense-vision",
        "gemma4",
        "Gemma4",
        {"text_config": {**_BASE, "attention_bias": True}, "vision_config": _VISION},
        task="ForConditionalGeneration",
        publish=_quiet,
    ),
)
