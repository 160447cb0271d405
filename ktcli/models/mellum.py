"""Mellum2 (12B-A2.5B): Qwen3-MoE with sliding windows, whose layers have their own rotation. Source: transformers
5.23."""

from __future__ import annotations

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import QkNorms
from ktcli.models.attention import of_kind, read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_mlps, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import FULL, SLIDING, cut_typed_dense, read_typed_dense, read_windows
from ktcli.models.skeleton import assemble

_ROPE = {FULL: {"rope_theta": 500_000.0}, SLIDING: {"rope_theta": 10_000.0}}
MODEL_TYPES: Defaults = {
    "mellum": {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "rope_parameters": _ROPE,
        "sliding_window": 1024,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    }
}

cut = cut_typed_dense


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    routing = read_routing(f, normalize=f.flag("norm_topk_prob", False))
    mlp = read_mlps(f, read_sparse(f, routing), read_typed_dense(f))
    window = read_windows(f, default=lambda _: False)

    def parts(i: int) -> tuple[Attention, Mlp]:
        own = of_kind(f, SLIDING if window(i) else FULL)
        attention = read_gqa(own, norms=QkNorms(), biased=True)
        return attention.within(window(i)), mlp(i)

    return assemble(f, "mellum", parts)
