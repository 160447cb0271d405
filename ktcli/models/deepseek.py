"""DeepSeek-V2, V2-Lite, V3, R1 and Kimi-K2: latent attention, shared expert, group-limited routing.

V2 scores its experts by softmax and its groups by their best; V3 and Kimi-K2 by sigmoid with a learned
correction, groups by their two best. Sources: the DeepSeek-V2 and V3 reports; transformers 5.23.
A multi-token-prediction layer (number `num_hidden_layers`) in the checkpoint is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.attention import LatentAttention
from ktcli.layers.backend import GroupScore, MlaShape, Routing, Score
from ktcli.layers.decoder import Decoder, DecoderLayer
from ktcli.layers.mlp import DenseMlp, Mlp, SparseMlp
from ktcli.models.config import MAX_CONTEXT, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, Fields, read_rope
from ktcli.models.model import DecoderModel, read_decoder

MODEL_TYPES: tuple[str, ...] = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    f.require("hidden_act", f.text("hidden_act", "silu"), "silu")
    f.require("mlp_bias", f.flag("mlp_bias", False), False)
    outer = read_decoder(f)
    n_layers = f.whole("num_hidden_layers", high=MAX_LAYERS)
    dense = _dense_layers(f)
    attention = _attention(f, outer.hidden)
    routing = _routing(f, _is_v2(f))

    def layer(i: int) -> DecoderLayer:
        source = f"model.layers.{i}"
        mlp = _mlp(f, i, outer.hidden, None if i < dense else routing)
        attend = replace(attention, layer=i, source=f"{source}.self_attn")
        return DecoderLayer(i, source, outer.hidden, outer.eps, attend, mlp)

    decoder: Decoder = replace(outer, layers=tuple(layer(i) for i in range(n_layers)))
    return DecoderModel("deepseek", decoder, f.whole("max_position_embeddings", high=MAX_CONTEXT))


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, at least one of them with experts."""
    dense = min(_dense_layers(Fields(config)), layers - 1)
    return {**config, "num_hidden_layers": layers, "first_k_dense_replace": dense}


def _is_v2(f: Fields) -> bool:
    return f.text("model_type", "") == "deepseek_v2"


def _dense_layers(f: Fields) -> int:
    default = 0 if _is_v2(f) else 3
    return f.whole("first_k_dense_replace", low=0, high=MAX_LAYERS, default=default)


def _attention(f: Fields, hidden: int) -> LatentAttention:
    heads, nope = f.whole("num_attention_heads", high=MAX_HEADS), f.whole("qk_nope_head_dim")
    rope_dim, v = f.whole("qk_rope_head_dim"), f.whole("v_head_dim")
    f.require_multiple("qk_rope_head_dim", rope_dim, 2)
    f.require_width("num_attention_heads x head width", heads * (nope + max(rope_dim, v)))
    # The published code of the family rotates interleaved pairs; transformers has a switch for it.
    rope, score_scale = read_rope(f, rope_dim, interleaved=f.flag("rope_interleave", True))
    scale = (nope + rope_dim) ** -0.5 * score_scale
    shape = MlaShape(heads, nope, rope_dim, v, f.whole("kv_lora_rank"), scale)
    q_lora = f.whole("q_lora_rank") if f.has("q_lora_rank") else 0
    return LatentAttention(0, "", hidden, q_lora, shape, rope, f.flag("attention_bias", False))


def _routing(f: Fields, v2: bool) -> Routing:
    experts = f.whole("n_routed_experts", "num_experts", "num_local_experts", high=MAX_EXPERTS)
    n_group = f.whole("n_group", high=experts, default=1)
    topk_group = f.whole("topk_group", high=n_group, default=n_group)
    f.require_multiple("n_routed_experts", experts, n_group)
    method = f.text("topk_method", "greedy" if v2 else "noaux_tc")
    if v2:
        f.require("topk_method", method, "greedy", "group_limited_greedy")
        f.require("scoring_func", f.text("scoring_func", "softmax"), "softmax")
        if method == "greedy":
            n_group = topk_group = 1
    else:
        f.require("topk_method", method, "noaux_tc")
        f.require("scoring_func", f.text("scoring_func", "sigmoid"), "sigmoid")
    available = experts // n_group * topk_group
    return Routing(
        experts=experts,
        top_k=f.whole("num_experts_per_tok", high=min(available, 64)),
        score=Score.SOFTMAX if v2 else Score.SIGMOID,
        n_group=n_group,
        topk_group=topk_group,
        group_score=GroupScore.MAX if v2 else GroupScore.TOP2,
        # DeepSeek-V2's router never normalises, whatever its config says.
        normalize=not v2 and f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", high=1e4, default=1.0 if v2 else 2.5),
    )


def _mlp(f: Fields, i: int, hidden: int, routing: Routing | None) -> Mlp:
    name, source = f"layers.{i}.mlp", f"model.layers.{i}.mlp"
    if routing is None:
        return DenseMlp(i, name, source, hidden, f.whole("intermediate_size"))
    width = f.whole("moe_intermediate_size")
    shared = f.whole("n_shared_experts", low=0, high=64, default=0)
    corrected = routing.score is Score.SIGMOID
    return SparseMlp(i, name, source, hidden, width, routing, corrected, shared * width)
