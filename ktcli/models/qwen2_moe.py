"""Qwen2-MoE (57B-A14B, Qwen1.5-MoE-A2.7B): biased q, k and v, a shared expert with a sigmoid gate.

Source: the Qwen2 report; transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ktcli.layers.names import SharedNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import MAX_LAYERS, Defaults, Fields
from ktcli.models.feedforward import read_mlps, read_routing, read_sparse
from ktcli.models.model import Model
from ktcli.models.pattern import cut_listed_dense, read_listed_dense, read_windows
from ktcli.models.skeleton import assemble

MODEL_TYPES: Defaults = {
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
}

cut = cut_listed_dense

_NAMES = SparseNames(shared=SharedNames("shared_expert"))


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    attention = read_gqa(f, qkv_bias=f.flag("qkv_bias", False))
    mlp, window = read_mlps(f, read_experts(f), read_listed_dense(f)), _windows(f)
    return assemble(f, "qwen2_moe", lambda i: (attention.within(window(i)), mlp(i)))


def read_experts(f: Fields) -> SparseMlp:
    """Returns the mixture-of-experts MLP that a config describes, with a shared expert whose output a gate scales."""
    routing = read_routing(f, normalize=f.flag("norm_topk_prob", False))
    shared = f.whole("shared_expert_intermediate_size")
    return replace(read_sparse(f, routing, names=_NAMES), shared_width=shared, shared_gate=True)


def _windows(f: Fields) -> Callable[[int], int]:
    """Returns the window of each layer: where windows are used at all, every second layer below a number has one."""
    if not f.flag("use_sliding_window", False):
        f.require_no_windows()
        return lambda _: 0
    end = f.whole("max_window_layers", low=0, high=MAX_LAYERS)
    return read_windows(f, default=lambda i: i < end and i % 2 == 0)
