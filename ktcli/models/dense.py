"""Dense models: Llama, Mistral, Qwen2 and Qwen3, which differ in biases and q/k norms.

Sources: the reports of the models; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.attention import QkNorm
from ktcli.models.config import Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import assemble, cut_layers, read_dense, read_gqa, read_windows

MODEL_TYPES: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3")

cut = cut_layers


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    kind = f.text("model_type", "")
    f.require("mlp_bias", f.flag("mlp_bias", False), False)
    f.require("use_sliding_window", f.flag("use_sliding_window", False), False)
    bias = kind in ("llama", "qwen3") and f.flag("attention_bias", False)
    norm = QkNorm.HEADS if kind == "qwen3" else QkNorm.NONE
    attention = read_gqa(f, qk_norm=norm, qkv_bias=bias or kind == "qwen2", o_bias=bias)
    if kind == "mistral":  # version 0.1 looks back 4096 positions
        window = read_windows(f, default=lambda _: True)
        attention = replace(attention, shape=replace(attention.shape, window=window(0)))
    return assemble(f, kind, lambda _: (attention, read_dense(f)))
