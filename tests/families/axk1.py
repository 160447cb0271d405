"""A.X K1: DeepSeek-V3 with a norm behind the experts."""

from pathlib import Path

import torch
from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 36,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 14,
    "v_head_dim": 22,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _publish(folder: Path) -> None:
    """The hub's has no correction, and a norm in the first layer, too, which nothing reads."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    kept = {k: v for k, v in tensors.items() if not k.endswith("e_score_correction_bias")}
    unused = torch.full((80,), 7.0, dtype=torch.bfloat16)
    kept["model.layers.0.post_mlp_layernorm.weight"] = unused
    save_file(kept, path, metadata={"format": "pt"})


CASES = (
    Case(
        "ax-k1",
        "axk1",
        "AXK1",
        _BASE,
        hub={
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
            "moe_layer_freq": 1,
            "rope_interleave": None,
            "scoring_func": "sigmoid",
        },
        seed=2,
        publish=_publish,
    ),
    # As transformers writes it: with a correction, and without a word of the first layers.
    Case(
        "ax-k1-corrected",
        "axk1",
        "AXK1",
        {
            **_BASE,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        seed=1,
    ),
)
