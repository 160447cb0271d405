"""Qwen3-MoE (30B-A3B, 235B-A22B): grouped-query attention with q/k norms, softmax top-k experts.

Source: the Qwen3 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.layers.attention import QkNorm
from ktcli.models.config import Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import (
    assemble,
    cut_listed_dense,
    read_dense,
    read_gqa,
    read_listed_dense,
    read_softmax_routing,
    read_sparse,
)

MODEL_TYPES: tuple[str, ...] = ("qwen3_moe",)

cut = cut_listed_dense


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    f.require("use_sliding_window", f.flag("use_sliding_window", False), False)
    bias = f.flag("attention_bias", False)
    attention = read_gqa(f, qk_norm=QkNorm.HEADS, qkv_bias=bias, o_bias=bias)
    routing = read_softmax_routing(f, normalize=f.flag("norm_topk_prob", False))
    sparse = read_sparse(f, routing)
    is_dense = read_listed_dense(f)
    return assemble(f, "qwen3_moe", lambda i: (attention, read_dense(f) if is_dense(i) else sparse))
