"""MiMo-V2-Flash: values narrower than keys, windows with sinks, two rotations."""

from dataclasses import dataclass
from typing import Any

from families.case import COMMON, Case

_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.334}
_BASE = {
    **COMMON,
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 26,
    "v_head_dim": 18,
    "moe_intermediate_size": 40,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": None,
    "sliding_window": 13,  # much less than the text
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {**_ROPE, "rope_theta": 5e6},
        "sliding_attention": {**_ROPE, "rope_theta": 1e4},
    },
    "max_position_embeddings": 512,
}
_LISTS = {"layer_types": "full_attention", "mlp_layer_types": "dense"}


@dataclass(frozen=True)
class _OtherNames(Case):
    """The hub has lists of 0 and 1, `swa_` before what layers with a window have, and a window without the token."""

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        types, mlps = ([kind != no for kind in config.pop(of)] for of, no in _LISTS.items())
        ropes, kv_heads = config.pop("rope_parameters"), config["num_key_value_heads"]
        window = config.pop("sliding_window") - 1
        config |= {
            "hybrid_layer_pattern": [int(each) for each in types],
            "moe_layer_freq": [int(each) for each in mlps],
            "layernorm_epsilon": config.pop("rms_norm_eps"),
            "rope_theta": ropes["full_attention"]["rope_theta"],
            "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
            "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
            "sliding_window": window,
            "sliding_window_size": window,
            "swa_num_key_value_heads": 2 * kv_heads,
            "n_shared_experts": None,
            "rope_scaling": None,
        }
        config |= {f"swa_{name}": config[name] for name in ("head_dim", "v_head_dim")}
        return config


CASES = (
    _OtherNames(
        "mimo-v2-flash",
        "mimo_v2_flash",
        "MiMoV2Flash",
        {**_BASE, "n_group": 2, "topk_group": 1},
        seed=3,
        thorough=True,
    ),
    _OtherNames(
        "mimo-v2-flash-wide",
        "mimo_v2_flash",
        "MiMoV2Flash",
        {**_BASE, "v_head_dim": 33, "attention_value_scale": None, "attention_bias": True},
    ),
)
