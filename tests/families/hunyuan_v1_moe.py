"""Hunyuan-A13B."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 10,
    "moe_topk": 3,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10_000.0,
        "alpha": 1000.0,
        "factor": 1.0,
    },
}

CASES = (
    Case(
        "hunyuan-a13b",
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        _BASE,
        hub={
            "moe_topk": [3] * 3,
            "num_shared_expert": [1] * 3,
            "moe_intermediate_size": [40] * 3,
            "use_cla": False,
            "use_qk_norm": True,
        },
    ),
)
