"""DeepSeek-V2, V2-Lite, V3 and Kimi-K2."""

from functools import partial
from pathlib import Path

from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}

_PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
_v3 = partial(Case, hub={**_PUBLISHED, "rope_interleave": None})

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def name_layers(folder: Path) -> None:
    """transformers writes the text's layers as "blocks", which is the hub's name of the vision's."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "language_model.model."
    save_file({k.replace(f"{name}blocks", f"{name}layers"): v for k, v in tensors.items()}, path)


CASES = (
    _v3(
        "deepseek-v3",
        "deepseek_v3",
        "DeepseekV3",
        {**_BASE, "n_group": 4, "topk_group": 2},
        seed=4,
        thorough=True,
    ),
    _v3(
        "deepseek-v3-yarn-unnormalised",
        "deepseek_v3",
        "DeepseekV3",
        {
            **_BASE,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
        seed=3,
    ),
    _v3(
        "kimi-k2",
        "kimi_k2",
        "DeepseekV3",
        {
            **_BASE,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    Case(
        "deepseek-v2",
        "deepseek_v2",
        "DeepseekV2",
        {
            **_BASE,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_shared_experts": 2,
            "mlp_bias": True,
        },
    ),
    Case(
        "deepseek-v2-lite",
        "deepseek_v2",
        "DeepseekV2",
        {
            **_BASE,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    Case(
        "kimi-k2.5",
        "kimi_k25",
        "Kimi_K25",
        {
            "text_config": {**_BASE, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
            "vision_config": _VISION,
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        task="ForConditionalGeneration",
        publish=name_layers,
    ),
    Case(
        "glm4-moe-lite",
        "glm4_moe_lite",
        "Glm4MoeLite",
        {name: value for name, value in _BASE.items() if name != "first_k_dense_replace"},
        hub={"mlp_layer_types": None, "first_k_dense_replace": 1},
    ),
)
