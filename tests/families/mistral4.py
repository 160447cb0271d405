"""Mistral Small 4, alone and beside vision."""

from families.case import COMMON, YARN, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 22,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}

CASES = (
    Case("mistral4", "mistral4", "Mistral4", {**_BASE, "first_k_dense_replace": 1}),
    Case(
        "mistral4-vision",
        "mistral3",
        "Mistral3",
        {
            "text_config": {
                **_BASE,
                "model_type": "mistral4",
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 16,
                "image_size": 28,
                "patch_size": 14,
            },
            "tie_word_embeddings": False,
        },
        task="ForConditionalGeneration",
    ),
)
