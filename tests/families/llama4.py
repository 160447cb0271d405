"""Llama 4: Scout's text alone, and Maverick's beside vision."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
    "num_key_value_heads": 2,
    "head_dim": 22,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 512,
    "attention_chunk_size": 56,  # not whole pages
    "floor_scale": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _said(out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scores and logits: the one expert that has the greatest."""
    return out[1], out[1].argmax(-1, keepdim=True)


def _logits(_: Any, __: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    return logits


@dataclass(frozen=True)
class TextCase(Case):
    """The class of the text alone is not called as its config is."""

    @property
    def model_class(self) -> Any:
        return transformers.Llama4ForCausalLM


CASES = (
    TextCase(
        "llama4-scout",
        "llama4_text",
        "Llama4Text",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        seed=4,
        hub={"moe_layers": None, "layer_types": None, "no_rope_layers": []},
        router="feed_forward.router",
        said=_said,
        choice=_logits,
        thorough=True,
    ),
    Case(
        "llama4-maverick",
        "llama4",
        "Llama4",
        {
            "text_config": {
                **_BASE,
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "num_local_experts": 16,
                "use_qk_norm": False,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0, 1, 1],
                "attention_bias": True,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        router="feed_forward.router",
        said=_said,
        choice=_logits,
        task="ForConditionalGeneration",
    ),
)
