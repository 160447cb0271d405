"""Granite 4 (H-Tiny, H-Small, and the dense H-Micro): most layers have Mamba-2, the others attention without
positions; experts together with a shared one, or only the shared one.

Multipliers are those of Granite-MoE. Source: transformers 5.23 (granitemoehybrid).
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.decoder import Attention, Mlp
from ktcli.layers.grouped_query import GroupedQueryAttention
from ktcli.layers.mamba2 import Mamba2
from ktcli.layers.mlp import DenseMlp
from ktcli.models.config import MAX_WIDTH, Defaults, Fields
from ktcli.models.granitemoe import PREFIXES, SHARED, read_attention, read_experts, read_multipliers
from ktcli.models.mamba import read_mamba
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_types
from ktcli.models.skeleton import assemble

MODEL_TYPES: Defaults = {
    "granitemoehybrid": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
}

_MAMBA = "mamba", "linear_attention"  # on the hub, and in transformers since 5.13
_ATTENTION = "attention", "full_attention"

cut = cut_layers


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    kinds, mlp = _kinds(f), _mlp(f)
    made: dict[bool, Attention] = {}
    for is_mamba in {kind in _MAMBA for kind in kinds}:
        made[is_mamba] = _mamba(f) if is_mamba else _attention(f)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return made[kinds[i] in _MAMBA], mlp

    return assemble(f, "granitemoehybrid", parts, PREFIXES, multipliers=read_multipliers(f))


def _kinds(f: Fields) -> list[str]:
    """Returns each layer's kind."""
    return read_types(f, "layer_types", *_MAMBA, *_ATTENTION) or [_MAMBA[0]] * f.n_layers


def _mamba(f: Fields) -> Mamba2:
    inner = f.whole("mamba_expand", high=64) * f.whole("hidden_size")
    heads = f.whole("mamba_num_heads", high=MAX_WIDTH)
    dim = inner // heads
    if f.values.get("mamba_d_head", "auto") != "auto":
        dim = f.whole("mamba_d_head", high=4096)
    f.require("mamba_n_heads x mamba_d_head", heads * dim, inner)
    return replace(read_mamba(f, dim), source="mamba")


def _attention(f: Fields) -> GroupedQueryAttention:
    rotates = f.text("position_embedding_type", "nope") == "rope"
    own = read_attention(f)
    return own if rotates else replace(own, rope=None)


def _mlp(f: Fields) -> Mlp:
    if f.whole("num_local_experts", low=0) > 0:
        return read_experts(f)
    width = f.whole("shared_intermediate_size")
    return DenseMlp(f.whole("hidden_size"), width, SHARED.within, source=SHARED.expert)
