"""Grouped-query attention with DeepSeek-V3's experts: GLM-4.5 to 4.7, dots.llm1, Solar-Open and Hy3.

They differ in biases, norms of q and k, how much of a head is rotated, and which layers are dense. Sources:
arXiv 2508.06471 (GLM-4.5), 2506.05767 (dots.llm1); transformers 5.23. Layers for multi-token prediction
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktcli.layers.decoder import Attention
from ktcli.layers.grouped_query import QkNorm
from ktcli.layers.mlp import USUAL_SPARSE, Mlp, SparseNames
from ktcli.models.config import Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import (
    assemble,
    cut_typed_dense,
    read_corrected_routing,
    read_dense,
    read_gqa,
    read_sparse,
    read_typed_dense,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one architecture computes, and what its config may leave out.

    Attributes:
        qk_norm: q and k are normalised; None: the config says.
        o_bias: attention_bias speaks of o, too.
        rotated: part of each head.
        dense: layers before the first with experts.
    """

    qk_norm: bool | None = False
    o_bias: bool = False
    rotated: float = 1.0
    theta: float = 10_000.0
    dense: int = 0
    normalize: bool = True
    scale: float = 1.0
    names: SparseNames = USUAL_SPARSE


_HY3 = SparseNames(router="router.gate.weight", correction="expert_bias", shared="shared_mlp")
_KINDS = {
    "glm4_moe": _Kind(qk_norm=None, rotated=0.5, dense=1),
    "dots1": _Kind(qk_norm=True, o_bias=True, normalize=False),
    "solar_open": _Kind(theta=1e6),
    "hy_v3": _Kind(True, o_bias=True, theta=11_158_840.0, dense=1, scale=2.826, names=_HY3),
}
MODEL_TYPES: tuple[str, ...] = tuple(_KINDS)


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    kind = _kind(f)
    f.require("mlp_bias", f.flag("mlp_bias", False), False)
    f.require_no_windows()
    norm = f.flag("use_qk_norm", False) if kind.qk_norm is None else kind.qk_norm
    bias = f.flag("attention_bias", False)
    attention = read_gqa(
        f,
        qk_norm=QkNorm.HEADS if norm else QkNorm.NONE,
        qkv_bias=bias,
        o_bias=bias and kind.o_bias,
        rotated=kind.rotated,
        theta=kind.theta,
    )
    routing = read_corrected_routing(f, scale=kind.scale, normalize=kind.normalize)
    sparse = read_sparse(f, routing, correction=True, names=kind.names)
    is_dense = read_typed_dense(f, kind.dense)

    def parts(i: int) -> tuple[Attention, Mlp]:
        return attention, read_dense(f) if is_dense(i) else sparse

    return assemble(f, "glm4_moe", parts)


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, at least one of them with experts."""
    return cut_typed_dense(config, layers, _kind(Fields(config)).dense)


def _kind(f: Fields) -> _Kind:
    return _KINDS[f.text("model_type", "glm4_moe")]
