"""OLMoE, FlexOlmo."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}

CASES = (
    Case("olmoe", "olmoe", "Olmoe", _BASE),
    Case(
        "flex-olmo",
        "flex_olmo",
        "FlexOlmo",
        {**_BASE, "pad_token_id": None, "num_experts": 4, "num_experts_per_tok": 2},
    ),
)
