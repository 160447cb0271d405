"""GLM-4.5, -Air, 4.6 and 4.7: grouped-query attention that rotates half of each head, DeepSeek-V3's experts.

Source: arXiv 2508.06471; transformers 5.23. Multi-token-prediction layers are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktcli.layers.attention import QkNorm
from ktcli.models.config import Fields
from ktcli.models.model import DecoderModel
from ktcli.models.parts import (
    assemble,
    cut_first_dense,
    read_corrected_routing,
    read_dense,
    read_first_dense,
    read_gqa,
    read_sparse,
)

MODEL_TYPES: tuple[str, ...] = ("glm4_moe",)

_DENSE = 1  # layers before the first with experts, unless the config says


def build(config: Mapping[str, Any]) -> DecoderModel:
    """The model that a config describes."""
    f = Fields(config)
    norm = QkNorm.HEADS if f.flag("use_qk_norm", False) else QkNorm.NONE
    attention = read_gqa(f, qk_norm=norm, qkv_bias=f.flag("attention_bias", False), rotated=0.5)
    sparse = read_sparse(f, read_corrected_routing(f), correction=True)
    n_dense = read_first_dense(f, _DENSE)
    return assemble(f, "glm4_moe", lambda i: (attention, read_dense(f) if i < n_dense else sparse))


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with only its first layers, at least one of them with experts."""
    return cut_first_dense(config, layers, _DENSE)
