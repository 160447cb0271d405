"""DeepSeek-V4: windows that become rows, several streams, experts by the token's id."""

from pathlib import Path
from typing import Any

import torch
from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file

_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def _choice(router: Any, inputs: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    """Root of softplus and a correction; or, where the id says it, far from any other choice."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    if not hasattr(router, "tid2eid"):
        return scores + router.e_score_correction_bias
    chosen = router.tid2eid[inputs[1].reshape(-1)]
    return torch.zeros_like(scores).scatter(1, chosen, 1.0)


# transformers' names, or what it makes of them when it saves -> the hub's; in this order.
_NAMES = (
    ("\\", ""),
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".sinks", ".attn_sink"),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".attn.norm.", ".attn.kv_norm."),
    (".position_bias", ".ape"),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".kv_proj.", ".wkv."),
    (".compressor.gate_proj.", ".compressor.wgate."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".q_a_norm.", ".q_norm."),
    (".e_score_correction_bias", ".bias"),
    (".shared_experts.gate_proj.", ".shared_experts.w1."),
    (".shared_experts.down_proj.", ".shared_experts.w2."),
    (".shared_experts.up_proj.", ".shared_experts.w3."),
)


def _publish(folder: Path) -> None:
    """The hub's names, each expert by itself; the output of attention is smaller, as in trained models."""
    path, made = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        name = name.removeprefix("model.")
        for own, hub in _NAMES:
            name = name.replace(own, hub)
        before, fused, _ = name.partition("experts.gate_up_proj")
        if fused:
            for e, both in enumerate(tensor):
                for of, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    made[f"{before}experts.{e}.{of}.weight"] = half.contiguous()
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(tensor):
                made[f"{name.removesuffix('down_proj')}{e}.w2.weight"] = one.contiguous()
        else:
            made[name] = tensor / 2 if name.endswith("wo_b.weight") else tensor
    save_file(made, path, metadata={"format": "pt"})


_VALUES = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "intermediate_size": 40,  # transformers' other name of moe_intermediate_size
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "sliding_window": 9,
    "o_groups": 2,
    "o_lora_rank": 20,
    "index_n_heads": 9,  # so many that no two scores are zero, whose order nothing defines
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
        publish=_publish,
        choice=_choice,
        seed=2,
        fast_error=0.05,  # 0.02 where every window is attended to
        thorough=True,
    ),
    # As published: windows of 4 and 128 positions, and layers by what the hub has instead of lists of names.
    Case(
        "deepseek-v4-flash",
        "deepseek_v4",
        "DeepseekV4",
        {
            **_VALUES,
            "layer_types": [_KINDS[0], *_KINDS],
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"],
            "compress_rates": None,
        },
        hub={
            **_HUB,
            "compress_rate_csa": None,
            "compress_rate_hca": None,
            "layer_types": None,
            "compress_ratios": [0, 0, 4, 128, 0],
            "mlp_layer_types": None,
            "num_hash_layers": 3,
        },
        publish=_publish,
        choice=_choice,
    ),
)
