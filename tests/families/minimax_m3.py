"""MiniMax-M3: blocks of positions that an indexer chooses, written with its vision part."""

from dataclasses import dataclass
from typing import Any

import transformers
from families.case import COMMON, Case

_TEXT = {
    **COMMON,
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "dense_intermediate_size": 72,
    "shared_intermediate_size": 56,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "rotary_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
    "index_n_heads": 2,
    "index_head_dim": 22,
    "index_block_size": 64,
    "index_topk_blocks": 2,  # of three
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
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
class _SeeingCase(Case):
    @property
    def model_class(self) -> Any:
        return transformers.MiniMaxM3SparseForConditionalGeneration


CASES = (
    _SeeingCase(
        "minimax-m3",
        "minimax_m3_vl",
        "MiniMaxM3VL",
        {
            "text_config": _TEXT,
            "vision_config": _VISION,
            "projector_hidden_size": 16,
            "image_token_index": 97,
            "video_token_index": 98,
        },
        seed=1,
        hub={"hidden_act": "swigluoai"},
    ),
)
