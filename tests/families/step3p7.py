"""Step-3.7-Flash, written with its vision part."""

from dataclasses import dataclass
from typing import Any

import transformers
from families.case import COMMON, Case

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 64,
}
_TYPES = ["full_attention", *["sliding_attention"] * 2, "full_attention"]
_TEXT = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_sliding_attention_heads": 6,
    "sliding_window": 13,  # much less than the text
    "layer_types": _TYPES,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "moe_intermediate_size": 40,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "share_expert_dim": 56,
    "moe_router_scaling_factor": 1.3,
    "query_pre_attn_scalar": 384,  # norms of q and k multiply by more than one
    "swiglu_limits": [None, 0.0, 0.3, 0.4],  # cut some of the values
    "swiglu_limits_shared": [0.2, None, 0.0, 0.3],
    "max_position_embeddings": 512,
    "rope_parameters": {
        "full_attention": {**_LLAMA3, "rope_theta": 5e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


@dataclass(frozen=True)
class _OtherNames(Case):
    """The hub lists what differs layer by layer, those for multi-token prediction too."""

    @property
    def model_class(self) -> Any:
        return transformers.Step3p7ForConditionalGeneration

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        near = [kind == "sliding_attention" for kind in _TYPES] + [True]
        for own, hub in (
            ("num_key_value_heads", "num_attention_groups"),
            ("n_routed_experts", "moe_num_experts"),
            ("num_experts_per_tok", "moe_top_k"),
        ):
            config[hub] = config.pop(own)
        dropped = ("mlp_layer_types", "rope_parameters", "num_local_experts", "per_layer_config")
        for name in (*dropped, "num_sliding_attention_heads"):
            config.pop(name, None)
        return config | {
            "model_type": "step3p5",
            "num_nextn_predict_layers": 1,
            "layer_types": [*_TYPES, "sliding_attention"],
            "swiglu_limits": [*config["swiglu_limits"], 0.0],
            "swiglu_limits_shared": [*config["swiglu_limits_shared"], 0.0],
            "attention_other_setting": {
                "num_attention_heads": 6,
                "num_attention_groups": 2,
                "head_dim": 24,
            },
            "moe_layers_enum": "1,2,3",
            "moe_router_activation": "sigmoid",
            "use_head_wise_attn_gate": True,
            "norm_expert_weight": True,
            "rope_theta": [1e4 if each else 5e4 for each in near],
            "partial_rotary_factors": [1.0 if each else 0.5 for each in near],
            "rope_scaling": _LLAMA3,
            "yarn_only_types": ["full_attention"],
        }


CASES = (
    _OtherNames(
        "step3.7",
        "step3p7",
        "Step3p7",
        {"text_config": _TEXT, "vision_config": _VISION, "image_token_id": 97},
        seed=6,
    ),
)
