"""Step-3.5-Flash and the text part of Step-3.7-Flash (196B-A11B): gated heads, of which layers with a sliding window
have more.

Each head of the attention has a gate of its own; layers with a window have a number of heads and a rotation of their
own. Norms multiply by 1 + weight; the router scores by sigmoid and has a learned correction; there is one shared
expert. The last layers clamp the output of the activation, and the up projection that is multiplied with it. Vision and
multi-token prediction are not read. Source: transformers 5.23 (step3p7).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.gates import OwnGates
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.layers.mlp import DenseMlp
from ktcli.layers.names import (
    CorrectionNames,
    EachExpert,
    FusedExperts,
    RouterNames,
    SharedNames,
    SparseNames,
)
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import of_kind, read_gqa
from ktcli.models.config import MAX_HEADS, MAX_LAYERS, TEXT, Defaults, Fields
from ktcli.models.feedforward import read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import (
    FULL,
    SLIDING,
    cut_typed_dense,
    read_typed_dense,
    read_types,
    read_windows,
)
from ktcli.models.skeleton import Prefixes, assemble, text_part
from ktcli.native import SILU, Glu
from ktcli.ops.table.experts import Score

_USUAL = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 3,
    "share_expert_dim": 1280,
}
MODEL_TYPES: Defaults = {"step3p5": _USUAL, "step3p7": {TEXT: _USUAL}}

_PREFIXES = Prefixes(norm_plus=1.0, ignored=("vision_model.*", "vit_large_projector.*"))
_NAMES = SparseNames(
    (EachExpert("gate_proj.weight", "up_proj.weight", "down_proj.weight"), FusedExperts()),
    RouterNames(correction=CorrectionNames("router_bias")),
    SharedNames("share_expert", beside=True),
)
# Fields of which one value is known.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "gating": True,
    "use_head_wise_attn_gate": True,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
}


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f = _own(f)
    f.only(_ONLY)
    kinds = read_types(f, "layer_types", FULL, SLIDING) or []  # `_own` has made them
    attentions = {kind: _attention(f, kind) for kind in dict.fromkeys(kinds)}
    window, is_dense = read_windows(f, default=lambda _: False), read_typed_dense(f)
    limits, shared_limits = read_limits(f, "swiglu_limits"), read_limits(f, "swiglu_limits_shared")
    sparse = _sparse(f)
    dense = DenseMlp(f.whole("hidden_size"), f.whole("intermediate_size"))

    def parts(i: int) -> tuple[Attention, Mlp]:
        own, beside = limited(limits[i]), limited(shared_limits[i])
        mlp = (
            replace(dense, glu=beside)
            if is_dense(i)
            else replace(sparse, glu=own, shared_glu=beside)
        )
        return attentions[kinds[i]].within(window(i)), mlp

    return assemble(f, "step3p7", parts, _PREFIXES)


def cut(f: Fields, layers: int) -> dict[str, Any]:
    """Returns a copy of the config `f` shortened to the model's first `layers` layers, at least one of them with routed
    experts.
    """
    return cut_typed_dense(_own(f), layers)


def _own(f: Fields) -> Fields:
    """Returns the config of the text model in transformers' spelling, with a list of layer types."""
    f = text_part(f, "step3p5") if f.values.get("model_type") == "step3p7" else f
    values = {**f.values, "hidden_act": "silu"}  # "swigluoai" means the limits
    f.require("hidden_act", f.text("hidden_act", "silu"), "silu", "swigluoai")
    if values.get("layer_types") is None:
        values["layer_types"] = [FULL] * f.n_layers
    if values.get("mlp_layer_types") is None and f.has("moe_layers_enum"):
        sparse = _numbers(f, "moe_layers_enum")
        values["mlp_layer_types"] = [
            "sparse" if i in sparse else "dense" for i in range(f.n_layers)
        ]
    if values.get("num_sliding_attention_heads") is None:
        values["num_sliding_attention_heads"] = _heads_of_windows(f)
    if values.get("rope_parameters") is None:
        values["rope_parameters"] = _rotations(f, values["layer_types"])
    return Fields(values, f.where)


def _numbers(f: Fields, name: str) -> set[int]:
    """Reads the numbers of layers from a list, or from a text with commas between."""
    given = f.values[name]
    each = given.split(",") if isinstance(given, str) else given
    if not isinstance(each, list | tuple) or len(each) > MAX_LAYERS:
        raise BadCheckpoint(f"{f.where}: {name} is not a short list of layers")
    try:
        return {int(one) for one in each if str(one).strip()}
    except (TypeError, ValueError) as error:
        raise BadCheckpoint(f"{f.where}: {name} has values that are not layer numbers") from error


def _heads_of_windows(f: Fields) -> int:
    """Reads the number of heads of layers with a window; whatever else could differ in them is refused."""
    other = Fields(
        f.values.get("attention_other_setting") or {}, f"{f.where}: attention_other_setting"
    )
    for name in ("num_attention_groups", "head_dim"):
        if other.has(name):
            other.require(name, other.values[name], f.values.get(name))
    heads = f.whole("num_attention_heads", high=MAX_HEADS)
    return other.whole("num_attention_heads", high=MAX_HEADS, default=heads)


def _rotations(f: Fields, types: Any) -> dict[str, Any]:
    """Returns for each kind of layer the rotation of the first of its kind; only layers with full attention are
    stretched."""
    found: dict[str, Any] = {}
    for i, kind in enumerate(types if isinstance(types, list) else []):
        if not isinstance(kind, str) or kind in found:
            continue
        theta = _of_layer(f, "rope_theta", i, 10_000.0)
        found[kind] = {
            "rope_theta": theta,
            "partial_rotary_factor": _of_layer(f, "partial_rotary_factors", i, 1.0),
        }
    if f.has("rope_scaling") and FULL in found:
        f.require("yarn_only_types", f.values.get("yarn_only_types"), [FULL])
        found[FULL] |= Fields(f.values["rope_scaling"], f"{f.where}: rope_scaling").values
    return found


def _of_layer(f: Fields, name: str, layer: int, default: float) -> Any:
    """Returns a layer's value of a field, which is one number for all or a list; the reader of rotations checks it."""
    given = f.values.get(name)
    if isinstance(given, list):
        given = given[layer] if layer < len(given) else None
    return default if given is None else given


def _attention(f: Fields, kind: str) -> GroupedQueryAttention:
    """Reads the attention of the layers of one kind."""
    own = of_kind(f, kind)
    if kind == SLIDING:
        heads = f.whole("num_sliding_attention_heads", high=MAX_HEADS)
        own = Fields({**own.values, "num_attention_heads": heads}, f.where)
    made = read_gqa(own, norms=QkNorms(plus=1.0), partly=True)
    scalar = f.number("query_pre_attn_scalar", low=1e-6, default=float(made.shape.head_dim))
    shape = replace(made.shape, scale=scalar**-0.5)
    return replace(made, shape=shape, gates=OwnGates("g_proj"))


def _sparse(f: Fields) -> SparseMlp:
    scale = "moe_router_scaling_factor"
    routing = read_routing(f, normalize=True, score=Score.SIGMOID, scale=scale)
    return SparseMlp(
        f.whole("hidden_size"),
        f.whole("moe_intermediate_size"),
        routing,
        correction=True,
        shared_width=f.whole("share_expert_dim"),
        names=_NAMES,
        source="moe",
    )


def read_limits(f: Fields, name: str) -> list[float]:
    """Returns the clamping limit of each layer's MLP activation, from the list in field `name`; 0: it has none."""
    listed = f.values.get(name) or [None] * f.n_layers
    if not isinstance(listed, list) or len(listed) < f.n_layers:
        raise BadCheckpoint(f"{f.where}: {name} is not a list of {f.n_layers} layers")
    return [
        Fields({name: one}, f.where).number(name, high=1e6, default=0.0)
        for one in listed[: f.n_layers]
    ]


def limited(limit: float) -> Glu:
    """Returns the activation min(silu(gate), limit) * clamp(up, -limit, limit); if `limit` is 0, silu(gate) * up."""
    if not limit:
        return SILU
    gate = limit
    for _ in range(60):  # Newton's steps: silu grows and its slope is above a half from 0 on
        below = 1.0 / (1.0 + math.exp(-gate))
        gate -= (gate * below - limit) / (below * (1.0 + gate * (1.0 - below)))
    return Glu(1.0, limit, 0.0, gate)
