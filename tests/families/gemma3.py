"""Gemma 3, and the text under its vision model."""

from dataclasses import dataclass
from typing import Any

import transformers
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 150,
    "sliding_window": 13,  # much less than the text
    "sliding_window_pattern": 3,
    "max_position_embeddings": 512,
}
_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 30_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class TwoBases(Case):
    """The hub has a base for each kind of layer, and a step instead of a list of kinds."""

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.cls.removesuffix("Text") + self.task)

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        rope = config.pop("rope_parameters")
        full, sliding = rope["full_attention"], rope["sliding_attention"]
        config["rope_theta"] = full.pop("rope_theta")
        config["rope_local_base_freq"] = sliding["rope_theta"]
        config["rope_scaling"] = full if full["rope_type"] != "default" else None
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        del config["layer_types"]
        return config


CASES = (
    TwoBases(
        "gemma3",
        "gemma3_text",
        "Gemma3Text",
        {**_BASE, "rope_parameters": _LINEAR, "final_logit_softcapping": 3.0},
        thorough=True,
    ),
    TwoBases(
        "gemma3-vision",
        "gemma3",
        "Gemma3",
        {
            "text_config": {**_BASE, "attention_bias": True},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
        },
        task="ForConditionalGeneration",
    ),
)
