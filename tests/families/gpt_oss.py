"""gpt-oss, its experts in bf16 as transformers saves them, and in MXFP4 as they are published."""

from families.case import COMMON, YARN, Case

_BASE = {
    **COMMON,
    "intermediate_size": 40,  # of an expert
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_local_experts": 10,
    "num_experts_per_tok": 3,
    "sliding_window": 13,  # much less than the text
    "swiglu_limit": 1.5,  # cuts some of the values
    "max_position_embeddings": 512,
    "rope_parameters": {**YARN, "rope_theta": 150_000.0, "truncate": False},
}


def _choice(router, _, logits):
    return logits


CASES = (Case("gpt-oss", "gpt_oss", "GptOss", _BASE, router="mlp.router", choice=_choice),)
