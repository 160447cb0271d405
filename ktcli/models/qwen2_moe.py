"""Qwen2-MoE (57B-A14B, Qwen1.5-MoE-A2.7B): biased q, k and v, a shared expert behind a sigmoid gate.

Source: the Qwen2 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.mlp import SparseNames
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

MODEL_TYPES: tuple[str, ...] = ("qwen2_moe",)

cut = cut_listed_dense

_NAMES = SparseNames(shared="shared_expert")


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    f.require("use_sliding_window", f.flag("use_sliding_window", False), False)
    attention = read_gqa(f, qkv_bias=f.flag("qkv_bias", True))
    routing = read_softmax_routing(f, normalize=f.flag("norm_topk_prob", False))
    shared = f.whole("shared_expert_intermediate_size")
    sparse = replace(read_sparse(f, routing, names=_NAMES), shared_width=shared, shared_gate=True)
    is_dense = read_listed_dense(f)
    return assemble(f, "qwen2_moe", lambda i: (attention, read_dense(f) if is_dense(i) else sparse))
