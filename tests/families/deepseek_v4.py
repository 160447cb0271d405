"""DeepSeek-V4: windows that become rows, several streams, experts by the token's id."""

from typing import Any

import torch

from families.case import COMMON, YARN, Case

_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def _choice(router: Any, inputs: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    """Root of softplus and a correction; or, where the id says it, far from any other choice."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    if not hasattr(router, "tid2eid"):
        return scores + router.e_score_correction_bias
    chosen = router.tid2eid[inputs[1].reshape(-1)]
    return torch.zeros_like(scores).scatter(1, chosen, 1.0)


_VALUES = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "sliding_window": 9,
    "o_groups": 2,
    "o_lora_rank": 20,
    "index_n_heads": 5,
    "index_head_dim": 14,
    "index_topk": 11,  # of 37 rows
    "swiglu_limit": 1.0,
    "max_position_embeddings": 512,
    "layer_types": [*_KINDS, _KINDS[1]],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "compress_rates": {_KINDS[1]: 4, _KINDS[2]: 64},
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1 / 3},
        "compress": {
            **YARN,
            "rope_theta": 160_000.0,
            "partial_rotary_factor": 1 / 3,
            "attention_factor": 1.0,
        },
    },
}

_HUB = {
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_scaling": {
        "type": "yarn",
        **{name: x for name, x in YARN.items() if name not in ("rope_type", "rope_theta")},
    },
    "partial_rotary_factor": None,
    "qk_rope_head_dim": 8,
    "compress_rates": None,
    "compress_rate_csa": 4,
    "compress_rate_hca": 64,
}

CASES = (
    Case(
        "deepseek-v4",
        "deepseek_v4",
        "DeepseekV4",
        _VALUES,
        hub=_HUB,
        choice=_choice,
        fast_error=0.08,
        thorough=True,
    ),
)
