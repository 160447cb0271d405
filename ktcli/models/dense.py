"""Dense models: Llama, Mistral, Qwen2, Qwen3 and the text of Qwen3-VL, which differ in biases and q/k norms.

Sources: the reports of the models; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable

from ktcli.layers.grouped_query import QkNorms
from ktcli.models.attention import read_gqa
from ktcli.models.config import TEXT, Defaults, Fields
from ktcli.models.feedforward import read_dense
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_upper_windows, read_windows
from ktcli.models.skeleton import BESIDE_VISION, USUAL_PREFIXES, assemble, text_part

_VISION = "qwen3_vl"
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
MODEL_TYPES: Defaults = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    _VISION: {
        "tie_word_embeddings": False,
        TEXT: {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0},
    },
}

cut = cut_layers
_QK_NORMED = "qwen3", _VISION


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    kind = str(f.values["model_type"])
    f = text_part(f, f"{_VISION}_text") if kind == _VISION else f
    mlp_bias = f.flag("mlp_bias", False)
    if kind != "llama":
        f.require("mlp_bias", mlp_bias, False)
    mlp = read_dense(f, bias=mlp_bias)
    bias = kind in ("llama", *_QK_NORMED) and f.flag("attention_bias", False)
    norms = QkNorms() if kind in _QK_NORMED else None
    attention = read_gqa(f, norms=norms, qkv_bias=bias or kind == "qwen2", o_bias=bias)
    window = _windows(f, kind)
    prefixes = BESIDE_VISION if kind == _VISION else USUAL_PREFIXES
    return assemble(f, kind, lambda i: (attention.within(window(i)), mlp), prefixes)


def _windows(f: Fields, kind: str) -> Callable[[int], int]:
    """Returns the window of each layer: every layer of Mistral has one; of Qwen, where windows are used at all,
    those from a number on; none of Llama and Qwen3-VL."""
    if kind == "mistral":
        return read_windows(f, default=lambda _: True)
    if kind in ("llama", _VISION) or not f.flag("use_sliding_window", False):
        return lambda _: 0
    return read_upper_windows(f)
