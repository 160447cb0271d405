"""Dense models: Llama, Mistral, Qwen2 and Qwen3, which differ in biases and q/k norms.

Sources: the reports of the models; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktcli.layers.grouped_query import QkNorms
from ktcli.models.attention import read_gqa
from ktcli.models.config import Fields
from ktcli.models.feedforward import read_dense
from ktcli.models.model import DecoderModel
from ktcli.models.pattern import cut_layers, read_upper_windows, read_windows
from ktcli.models.skeleton import assemble

_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
MODEL_TYPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}

cut = cut_layers


def build(config: Mapping[str, Any]) -> DecoderModel:
    """Returns the model that a config describes, without weights."""
    f = Fields(config)
    kind = f.text("model_type", "")
    mlp_bias = f.flag("mlp_bias", False)
    if kind != "llama":
        f.require("mlp_bias", mlp_bias, False)
    mlp = read_dense(f, bias=mlp_bias)
    bias = kind in ("llama", "qwen3") and f.flag("attention_bias", False)
    norms = QkNorms() if kind == "qwen3" else None
    attention = read_gqa(f, norms=norms, qkv_bias=bias or kind == "qwen2", o_bias=bias)
    window = _windows(f, kind)
    return assemble(f, kind, lambda i: (attention.within(window(i)), mlp))


def _windows(f: Fields, kind: str) -> Callable[[int], int]:
    """Returns the window of each layer: every layer of Mistral has one; of Qwen, where windows are used at all,
    those from a number on; none of Llama."""
    if kind == "mistral":
        return read_windows(f, default=lambda _: True)
    if kind == "llama" or not f.flag("use_sliding_window", False):
        return lambda _: 0
    return read_upper_windows(f)
