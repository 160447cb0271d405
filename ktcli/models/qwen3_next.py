"""Qwen3-Next, and the text part of Qwen3.5 and Qwen3.5-MoE: of four layers, three have linear attention (the
gated delta rule) and one gated grouped-query attention; softmax top-k experts, and a shared one behind a gate.

Norms multiply by 1 + weight. The checkpoint of Qwen3.5 keeps the linear layers' projections as tensors of their
own; beside a vision part, text lies below "language_model". Vision and multi-token prediction are not read.
Source: transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.gated_delta import GatedDeltaNet
from ktcli.layers.gates import QueryGates
from ktcli.layers.grouped_query import QkNorms
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_HEADS, MAX_LAYERS, TEXT, Defaults, Fields, read_eps
from ktcli.models.feedforward import read_dense, read_mlps
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, LINEAR, cut_listed_dense, read_listed_dense, read_types
from ktcli.models.qwen2_moe import read_experts
from ktcli.models.skeleton import Prefixes, assemble, text_part
from ktcli.ops.table.recurrent import DeltaShape

_NEXT, _MOE, _DENSE = "qwen3_next", "qwen3_5_moe", "qwen3_5"
_USUAL = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    **_USUAL,
    "num_key_value_heads": 2,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}
_PLAIN = {**_USUAL, "num_key_value_heads": 4}
MODEL_TYPES: Defaults = {
    _NEXT: _EXPERTS,
    _MOE: {**_EXPERTS, TEXT: _EXPERTS, "tie_word_embeddings": False},
    f"{_MOE}_text": _EXPERTS,
    _DENSE: {**_PLAIN, TEXT: _PLAIN, "tie_word_embeddings": False},
    f"{_DENSE}_text": _PLAIN,
}

cut = cut_listed_dense

_VISION = ("model.visual.*",)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    body = "model.language_model" if _has_vision(f) else "model"
    f = _text(f)
    f.only({"attention_bias": False})
    next_one = f.text("model_type", "") == _NEXT
    kinds = _kinds(f)
    full = replace(read_gqa(f, norms=QkNorms(plus=1.0), partly=True), gates=QueryGates())
    f.require_few("num_attention_heads", full.shape.heads)
    linear = _delta_net(f, by_head=next_one)
    of_kind: dict[str, Attention] = {LINEAR: linear, FULL: full}
    mlp, prefixes = _mlp(f), Prefixes(body=body, norm_plus=1.0, ignored=_VISION)
    return assemble(f, "qwen3_next", lambda i: (of_kind[kinds[i]], mlp(i)), prefixes)


def _text(f: Fields) -> Fields:
    """Returns the text part of a config, which is nested where there is a vision part."""
    if not _has_vision(f):
        return f
    return text_part(f, f"{f.values['model_type']}_text")


def _has_vision(f: Fields) -> bool:
    """Returns whether the config has a vision part, beside which the text part is nested."""
    return f.has(TEXT)


def _kinds(f: Fields) -> list[str]:
    """Returns each layer's kind of attention."""
    every = f.whole("full_attention_interval", high=MAX_LAYERS)
    usual = [LINEAR if (i + 1) % every else FULL for i in range(f.n_layers)]
    return read_types(f, "layer_types", LINEAR, FULL) or usual


def _delta_net(f: Fields, *, by_head: bool) -> GatedDeltaNet:
    """Reads the linear attention."""
    heads = f.whole("linear_num_value_heads", high=MAX_HEADS)
    key_heads = f.whole("linear_num_key_heads", high=heads)
    f.require_few("linear_num_key_heads", key_heads)
    f.require_multiple("linear_num_value_heads", heads, key_heads)
    dk = f.whole("linear_key_head_dim", high=4096)
    dv = f.whole("linear_value_head_dim", high=4096)
    f.require_width("width of linear attention", 2 * key_heads * dk + 2 * heads * dv)
    width = f.whole("linear_conv_kernel_dim", low=2, high=16)
    shape = DeltaShape(heads, key_heads, dk, dv)
    hidden = f.whole("hidden_size")
    return GatedDeltaNet(hidden, shape, width, read_eps(f), by_head, source="linear_attn")


def _mlp(f: Fields) -> Callable[[int], Mlp]:
    """Returns the MLP of each layer."""
    if f.text("model_type", "").removesuffix("_text") == _DENSE:
        dense = read_dense(f)
        return lambda i: dense
    return read_mlps(f, read_experts(f), read_listed_dense(f))
