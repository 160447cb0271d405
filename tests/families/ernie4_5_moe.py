"""ERNIE-4.5."""

from typing import Any

import torch
from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 40,
    "moe_num_experts": 10,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "tie_word_embeddings": False,  # a tied head has one format there, and two here
    "max_position_embeddings": 512,
}


def corrected(router: Any, _: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1) + router.moe_statics.e_score_correction_bias


CASES = (Case("ernie4.5-moe", "ernie4_5_moe", "Ernie4_5_Moe", _BASE, choice=corrected),)
