"""Qwen3-MoE (30B-A3B, 235B-A22B): grouped-query attention with q/k norms, softmax top-k experts.

Source: the Qwen3 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.attention import GroupedQueryAttention
from ktcli.layers.backend import GqaShape, Routing
from ktcli.layers.decoder import DecoderLayer
from ktcli.layers.mlp import DenseMlp, Mlp, SparseMlp
from ktcli.models.config import MAX_CONTEXT, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, Fields, read_rope
from ktcli.models.model import DecoderModel, read_decoder

MODEL_TYPES: tuple[str, ...] = ("qwen3_moe",)


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    f.require("hidden_act", f.text("hidden_act", "silu"), "silu")
    f.require("use_sliding_window", f.flag("use_sliding_window", False), False)
    outer = read_decoder(f)
    n_layers = f.whole("num_hidden_layers", high=MAX_LAYERS)
    attention = _attention(f, outer.hidden, outer.eps)
    routing = Routing(
        experts=f.whole("num_experts", "num_local_experts", high=MAX_EXPERTS),
        top_k=f.whole("num_experts_per_tok", high=64),
        normalize=f.flag("norm_topk_prob", False),
    )
    if routing.top_k > routing.experts:
        raise BadCheckpoint(
            f"config.json: {routing.top_k} of only {routing.experts} experts per token"
        )

    def layer(i: int) -> DecoderLayer:
        source = f"model.layers.{i}"
        attend = replace(attention, layer=i, source=f"{source}.self_attn")
        return DecoderLayer(
            i, source, outer.hidden, outer.eps, attend, _mlp(f, i, outer.hidden, routing)
        )

    decoder = replace(outer, layers=tuple(layer(i) for i in range(n_layers)))
    return DecoderModel("qwen3_moe", decoder, f.whole("max_position_embeddings", high=MAX_CONTEXT))


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, at least one of them with experts."""
    f = Fields(config)
    return {
        **config,
        "num_hidden_layers": layers,
        "mlp_only_layers": [i for i in _dense_layers(f) if i < layers - 1],
        "decoder_sparse_step": min(_sparse_step(f), layers),
    }


def _sparse_step(f: Fields) -> int:
    """Of so many layers in a row, the last has experts."""
    return f.whole("decoder_sparse_step", high=MAX_LAYERS, default=1)


def _dense_layers(f: Fields) -> list[Any]:
    """Numbers of the layers without experts."""
    listed = f.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or len(listed) > MAX_LAYERS:
        raise BadCheckpoint("config.json: mlp_only_layers is not a short list of layers")
    return listed


def _attention(f: Fields, hidden: int, eps: float) -> GroupedQueryAttention:
    heads = f.whole("num_attention_heads", high=MAX_HEADS)
    kv_heads = f.whole("num_key_value_heads", high=heads, default=heads)
    f.require_multiple("num_attention_heads", heads, kv_heads)
    head_dim = f.whole("head_dim", high=4096, default=max(1, hidden // heads))
    f.require_multiple("head_dim", head_dim, 2)
    f.require_width("num_attention_heads x head_dim", heads * head_dim)
    rope, _ = read_rope(f, head_dim, interleaved=False)
    shape = GqaShape(heads, kv_heads, head_dim, head_dim**-0.5)
    return GroupedQueryAttention(
        0, "", hidden, shape, rope, eps, True, f.flag("attention_bias", False)
    )


def _mlp(f: Fields, i: int, hidden: int, routing: Routing) -> Mlp:
    name, source = f"layers.{i}.mlp", f"model.layers.{i}.mlp"
    if i in _dense_layers(f) or (i + 1) % _sparse_step(f):
        return DenseMlp(i, name, source, hidden, f.whole("intermediate_size"))
    return SparseMlp(i, name, source, hidden, f.whole("moe_intermediate_size"), routing)
