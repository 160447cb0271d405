"""Laguna (XS.2): a softplus gate for each head, a number of heads listed for each layer, sliding windows; one shared
expert.

The router scores by sigmoid with a correction. Layers with a window have a rotation of their own. Source: transformers
5.23.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.errors import BadCheckpoint
from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.gates import OwnGates
from ktcli.layers.grouped_query import GroupedQueryAttention, QkNorms
from ktcli.layers.names import CorrectionNames, RouterNames, SharedNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import of_kind, read_gqa
from ktcli.models.config import MAX_HEADS, Defaults, Fields
from ktcli.models.feedforward import read_mlps, read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, SLIDING, cut_typed_dense, read_typed_dense, read_windows
from ktcli.models.skeleton import assemble
from ktcli.ops.table.experts import Score
from ktcli.ops.table.rowwise import GateKind

_HEADS = "num_attention_heads_per_layer"
_ROPE = {
    FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
MODEL_TYPES: Defaults = {
    "laguna": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rope_parameters": _ROPE,
        "sliding_window": 512,
        "first_k_dense_replace": 1,
        "shared_expert_intermediate_size": 512,
    }
}

cut = cut_typed_dense
_NAMES = SparseNames(
    router=RouterNames(correction=CorrectionNames("experts.e_score_correction_bias")),
    shared=SharedNames("shared_expert"),
)


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    f.only({"attention_bias": False})
    f.require("gating", f.values.get("gating", True), True, "per-head")
    for name in ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
        f.require(name, f.values.get(name) or False, False)
    window, is_dense = read_windows(f, default=lambda _: False), read_typed_dense(f)
    mlp, heads = read_mlps(f, _sparse(f), is_dense), _heads(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        own = _attention(f, SLIDING if window(i) else FULL, heads[i])
        return own.within(window(i)), mlp(i)

    return assemble(f, "laguna", parts)


def _heads(f: Fields) -> list[int]:
    """Returns the number of query heads of each layer."""
    listed = f.values.get(_HEADS)
    if listed is None:
        return [f.whole("num_attention_heads", high=MAX_HEADS)] * f.n_layers
    if not isinstance(listed, list) or len(listed) < f.n_layers:
        raise BadCheckpoint(f"{f.where}: {_HEADS} is not a list of {f.n_layers} layers")
    return [Fields({_HEADS: one}, f.where).whole(_HEADS, high=MAX_HEADS) for one in listed]


def _attention(f: Fields, kind: str, heads: int) -> GroupedQueryAttention:
    own = Fields({**of_kind(f, kind).values, "num_attention_heads": heads}, f.where)
    return replace(
        read_gqa(own, norms=QkNorms(), partly=True), gates=OwnGates("g_proj", GateKind.SOFTPLUS)
    )


def _sparse(f: Fields) -> SparseMlp:
    scale = "moe_routed_scaling_factor"
    routing = read_routing(f, normalize=True, score=Score.SIGMOID, scale=scale)
    shared = f.whole("shared_expert_intermediate_size")
    width = f.whole("moe_intermediate_size")
    return SparseMlp(f.whole("hidden_size"), width, routing, True, shared, names=_NAMES)
