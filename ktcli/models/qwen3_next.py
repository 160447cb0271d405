"""Qwen3-Next, and the text part of Qwen3.5 and Qwen3.5-MoE: of four layers, three have linear attention (the
gated delta rule) and one gated grouped-query attention; softmax top-k experts and a shared one with a gate.

Norms multiply by 1 + weight. Qwen3.5 differs in where its checkpoint keeps things: below "language_model",
with the linear layers' projections as tensors of their own. Vision and multi-token prediction are not read.
Source: transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.attention import Attention, QkNorm
from ktcli.layers.backend import DeltaShape
from ktcli.layers.mlp import SparseNames
from ktcli.layers.recurrent import GatedDeltaNet
from ktcli.models.config import MAX_HEADS, MAX_LAYERS, Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import (
    Prefixes,
    assemble,
    cut_listed_dense,
    read_dense,
    read_eps,
    read_gqa,
    read_listed_dense,
    read_softmax_routing,
    read_sparse,
)

_NEXT, _MOE, _DENSE = "qwen3_next", "qwen3_5_moe", "qwen3_5"
MODEL_TYPES: tuple[str, ...] = (
    _NEXT,
    _MOE,
    f"{_MOE}_text",
    _DENSE,
    f"{_DENSE}_text",
)

_LINEAR, _FULL = "linear_attention", "full_attention"
_WRAPPED = "text_config"  # of a config with a vision part beside it


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = _text(config)
    f.require("attention_bias", f.flag("attention_bias", False), False)
    by_head = f.text("model_type", "") == _NEXT
    kinds = _layer_types(f)
    full = read_gqa(f, qk_norm=QkNorm.HEADS, rotated=0.25)
    parts: dict[str, Attention] = {
        _FULL: replace(full, gated=True, norm_plus=1.0),
        _LINEAR: _delta_net(f, by_head),
    }
