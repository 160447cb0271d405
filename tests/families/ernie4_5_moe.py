"""ERNIE-4.5, and beside vision."""

from dataclasses import dataclass
from typing import Any

import torch
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 40,
    "moe_num_experts": 10,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "tie_word_embeddings": False,  # a tied head has one format there, and two here
    "max_position_embeddings": 512,
}


def corrected(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1) + router.moe_statics.e_score_correction_bias


_SEEING = {**_BASE, "moe_intermediate_size": [40, 24]}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2}


@dataclass(frozen=True)
class _Flat(Case):
    """The publisher's config is not nested, and lists numbers for text and for pictures."""

    def hub_spelling(self) -> dict[str, Any]:
        whole = self.own_spelling()
        text = self._spell(whole.pop("text_config"))
        layers = [kind == "sparse" for kind in text.pop("mlp_layer_types")]
        return {
            **text,
            "model_type": "ernie4_5_moe_vl",
            "moe_num_experts": [10, 10],
            "moe_layer_start_index": [layers.index(True)] * 2,
            "moe_layer_end_index": [2, 1],
            "tie_word_embeddings": whole["tie_word_embeddings"],
        }


CASES = (
    Case("ernie4.5-moe", "ernie4_5_moe", "Ernie4_5_Moe", _BASE, choice=corrected),
    _Flat(
        "ernie4.5-vl",
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoe",
        {
            "text_config": {
                **_SEEING,
                "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 4]},
            },
            "vision_config": _VISION,
            "tie_word_embeddings": False,
        },
        task="ForConditionalGeneration",
        router="text_moe.gate",
        choice=corrected,
        seed=1,
    ),
)
