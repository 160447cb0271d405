"""gpt-oss (20b, 120b): grouped-query attention with sinks, a window in every second layer, experts with biases.

The router has a bias on its logits and weights the chosen experts by the softmax over them alone, which is the
softmax over all, normalised. Published weights of experts are MXFP4: blocks of 32 with a power of two.
Source: the gpt-oss model card (arXiv 2508.10925); transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktcli.layers.mlp import SparseMlp, SparseNames
from ktcli.models.config import Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import (
    assemble,
    cut_layers,
    read_gqa,
    read_softmax_routing,
    read_windows,
)
from ktcli.native import Glu

MODEL_TYPES: tuple[str, ...] = ("gpt_oss",)

_NAMES = SparseNames(interleaved=True, router="router.weight", router_bias="router.bias")
_THETA = 150_000.0
# Where the config says nothing of it.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

cut = cut_layers


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    if not f.has("rope_parameters", "rope_scaling"):
        f = Fields({**config, "rope_parameters": _ROPE})
    bias = f.flag("attention_bias", True)
    attention = read_gqa(f, qkv_bias=bias, o_bias=bias, theta=_THETA)
    attention = replace(attention, sinks_name="sinks")
    window = read_windows(f, default=lambda i: i % 2 == 0)
    sparse = SparseMlp(
        f.whole("hidden_size"),
        f.whole("intermediate_size"),
        read_softmax_routing(f, normalize=True),
        names=_NAMES,
        glu=_glu(f),
        biases=True,
    )

    return assemble(f, "gpt_oss", lambda i: (attention.within(window(i)), sparse))


def _glu(f: Fields) -> Glu:
    """gate and up are clamped, and up is shifted by one."""
    alpha = f.number("swiglu_alpha", low=1e-3, high=1e3, default=1.702)
    return Glu(alpha, f.number("swiglu_limit", low=1e-3, high=1e6, default=7.0), 1.0)
