"""Builds models from configs: one file for each family (see `Family`), listed here."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol

from ktcli.errors import BadCheckpoint
from ktcli.models import (
    afmoe,
    axk1,
    bailing_hybrid,
    deepseek,
    deepseek_v4,
    deepseek_v32,
    dense,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    glm5_next,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    laguna,
    mellum,
    mimo_v2_flash,
    minimax_m3,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    step3p7,
)
from ktcli.models.config import completed
from ktcli.models.model import Model, Spec

Config = Mapping[str, Any]


class Family(Protocol):
    """The interface of a family file."""

    # The model types that it builds, each with transformers' defaults of fields that a config may leave out,
    # see `completed`.
    MODEL_TYPES: Mapping[str, Mapping[str, Any]]

    def build(self, config: Config) -> Model:
        """Builds the model that a config describes."""

    def cut(self, config: Config, layers: int) -> dict[str, Any]:
        """Returns the config with only its first layers, see `cut` below."""


_FAMILIES: tuple[Family, ...] = (
    afmoe,
    axk1,
    bailing_hybrid,
    deepseek,
    deepseek_v32,
    deepseek_v4,
    dense,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    glm5_next,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    laguna,
    mellum,
    mimo_v2_flash,
    minimax_m3,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    step3p7,
)
_OF_TYPE: dict[str, Family] = {name: family for family in _FAMILIES for name in family.MODEL_TYPES}

__all__ = ["Model", "Spec", "build", "cut", "families", "model_types"]


def families() -> dict[str, tuple[str, ...]]:
    """Returns the model types of every family, by the name of its file."""
    named = ((str(vars(family)["__name__"]).rpartition(".")[2], family) for family in _FAMILIES)
    return {name: tuple(family.MODEL_TYPES) for name, family in named}


def model_types() -> tuple[str, ...]:
    """Returns every `model_type` that kt knows, in alphabetical order."""
    return tuple(sorted(_OF_TYPE))


def build(config: Config) -> Model:
    """Builds the model that a `config.json` describes.

    Raises:
        BadCheckpoint: unknown architecture, or a field missing, of the wrong type or out of bounds.
    """
    family, whole = _read(config)
    return family.build(whole)


def cut(config: Config, layers: int) -> dict[str, Any]:
    """Returns the config with only its first `layers` layers, at least one of which has routed experts.

    Where the model begins with more dense layers than that, fewer of them are kept. This is for measuring: a
    layer costs the same wherever it stands.

    Raises:
        BadCheckpoint: unknown architecture.
    """
    family, whole = _read(config)
    return family.cut(whole, layers)


def _read(config: Config) -> tuple[Family, Config]:
    """Returns the family of a config, and the config completed with the fields that it leaves out."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(kind, str) or kind not in _OF_TYPE:
        near = get_close_matches(str(kind)[:60], model_types(), n=1, cutoff=0.0)
        nearest = f"; the nearest name is {near[0]}" if kind else ""
        raise BadCheckpoint(
            f"unknown architecture: model_type is {str(kind)[:60]!r}",
            hint=f"this version knows {', '.join(model_types())}{nearest}",
        )
    family = _OF_TYPE[kind]
    return family, completed(config, family.MODEL_TYPES[kind])
