"""GLM-4.5 and -Air, dots.llm1, Solar-Open, Hy3."""

from families.case import COMMON, Case
from families.mixtral import corrected
from families.qwen3_moe import VISION

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "attention_bias": True,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}

_ONLY_GLM = ("n_routed_experts", "first_k_dense_replace")
_HY3 = {name: value for name, value in _BASE.items() if name not in _ONLY_GLM}

CASES = (
    Case("glm4-moe", "glm4_moe", "Glm4Moe", {**_BASE, "use_qk_norm": True}),
    Case(
        "dots1",
        "dots1",
        "Dots1",
        {
            **_BASE,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "sliding_window": 40,
            "max_window_layers": 1,
        },
        hub={"layer_types": None},
    ),
    Case("solar-open", "solar_open", "SolarOpen", {**_BASE, "first_k_dense_replace": 0}),
    Case(
        "hy3",
        "hy_v3",
        "HYV3",
        {**_HY3, "num_experts": 16, "num_shared_experts": 1, "router_scaling_factor": 1.7},
        choice=corrected,
    ),
    Case(
        "glm4-vision",
        "glm4v_moe",
        "Glm4vMoe",
        {
            "text_config": {
                **_BASE,
                "rope_parameters": {
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 2, 2],
                },
            },
            "vision_config": VISION,
        },
        task="ForConditionalGeneration",
    ),
    Case("glm4-moe-air", "glm4_moe", "Glm4Moe", {**_BASE, "n_group": 4, "topk_group": 2}),
)
