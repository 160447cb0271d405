"""MiMo-V2-Flash (309B-A15B): values narrower than keys, windows with sinks in most layers, DeepSeek-V3's router.

Layers with a window have twice the kv heads and a rotation of their own; there is no shared expert. The hub's config
has other names of layers and windows than transformers, which reads `sliding_window_size` as the positions before the
token's own. Multi-token prediction is not read. Source: transformers 5.23 (mimo_v2_flash).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.grouped_query import GroupedQueryAttention
from ktcli.models.attention import of_kind, read_gqa
from ktcli.models.config import MAX_CONTEXT, MAX_HEADS, Defaults, Fields
from ktcli.models.feedforward import V3_EXPERTS, read_corrected_routing, read_mlps, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, SLIDING, cut_typed_dense, read_typed_dense, read_types
from ktcli.models.skeleton import assemble

# The hub's names of the rotary base of each kind of layer, and its defaults.
_THETA_NAMES = {"rope_theta": (FULL, 5e6), "swa_rope_theta": (SLIDING, 1e4)}
# Fields of which one value is known.
_ONLY = {
    "mlp_bias": False,
    "use_qk_norm": False,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
MODEL_TYPES: Defaults = {
    "mimo_v2_flash": {
        **V3_EXPERTS,
        "n_shared_experts": None,
        "routed_scaling_factor": 1.0,
        "head_dim": 192,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.334,
        "sliding_window": 129,
        "first_k_dense_replace": 1,
        "attention_value_scale": 0.707,
    }
}
# The hub's lists of 0 and 1, one for each layer: transformers' name of each, and what 0 and 1 mean.
_LISTS = {
    "hybrid_layer_pattern": ("layer_types", (FULL, SLIDING)),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    _refuse_others(f)
    kinds = read_types(f, "layer_types", FULL, SLIDING) or []  # `_own` has made them
    attentions = {kind: _attention(f, kind) for kind in dict.fromkeys(kinds)}
    sparse = read_sparse(f, read_corrected_routing(f), correction=True)
    mlp = read_mlps(f, sparse, read_typed_dense(f))
    return assemble(f, "mimo_v2_flash", lambda i: (attentions[kinds[i]], mlp(i)))


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    return cut_typed_dense(_own(f), layers)


def _own(f: Fields) -> Fields:
    """Returns the config in transformers' spelling, with a list of layer types."""
    values = dict(f.values)
    for name, (own, kinds) in _LISTS.items():
        listed: list[Any] | None = read_types(f, name, 0, 1)
        values.pop(name, None)
        if listed is None:
            continue
        given = [kinds[int(each)] for each in listed]  # 1.0 is 1 too
        if values.get(own) not in (None, given):
            raise BadCheckpoint(f"{f.where}: {name} and {own} contradict each other")
        values[own] = given
    if values.get("layer_types") is None:
        values["layer_types"] = [SLIDING if i and (i + 1) % 6 else FULL for i in range(f.n_layers)]
    if values.get("rms_norm_eps") is None:
        values["rms_norm_eps"] = values.get("layernorm_epsilon")
    if values.get("rope_parameters") is None:
        f.require_absent("rope_scaling")
        values["rope_parameters"] = {
            kind: {"rope_theta": theta if values.get(name) is None else values[name]}
            for name, (kind, theta) in _THETA_NAMES.items()
        }
    return Fields(values, f.where)


def _refuse_others(f: Fields) -> None:
    """Refuses what a config could say and this family does not compute."""
    f.only(_ONLY)
    f.require_absent("n_shared_experts")
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        if f.has(f"swa_{name}"):  # both kinds of layers have the same
            f.require(f"swa_{name}", f.values[f"swa_{name}"], f.values.get(name))


def _attention(f: Fields, kind: str) -> GroupedQueryAttention:
    """Reads the attention of the layers of one kind."""
    values = dict(of_kind(f, kind).values)
    if kind == SLIDING:
        doubled = 2 * f.whole("num_key_value_heads", high=MAX_HEADS)
        kv_heads = f.whole("swa_num_key_value_heads", high=MAX_HEADS, default=doubled)
        values["num_key_value_heads"] = kv_heads
    bias = f.flag("attention_bias", False)
    own = read_gqa(Fields(values, f.where), qkv_bias=bias, partly=True)
    v = f.whole("v_head_dim", high=4096)
    f.require_width("num_attention_heads x v_head_dim", own.shape.heads * v)
    scale = f.number("attention_value_scale", high=1e3, default=1.0)
    own = replace(own, shape=replace(own.shape, v=v), value_scale=scale)
    if kind == FULL:
        return own
    return replace(own.within(_window(f)), sinks_name="attention_sink_bias")


def _window(f: Fields) -> int:
    """Reads the number of positions that a token sees, its own included."""
    if f.has("sliding_window_size"):
        return f.whole("sliding_window_size", high=MAX_CONTEXT) + 1
    return f.whole("sliding_window", high=MAX_CONTEXT)
