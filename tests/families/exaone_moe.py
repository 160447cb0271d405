"""K-EXAONE."""

from families.case import COMMON, Case

_BASE = {
    **COMMON,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "sliding_window": 40,
    "sliding_window_pattern": 4,
    "max_position_embeddings": 512,
}

CASES = (Case("exaone-moe", "exaone_moe", "ExaoneMoe", _BASE, seed=5),)
