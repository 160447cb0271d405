"""Model families: config in, model out. One file per family, listed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models import deepseek, qwen3_moe
from ktcli.models.model import Model, Spec

_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Model]] = {
    name: family.build for family in (deepseek, qwen3_moe) for name in family.MODEL_TYPES
}

__all__ = ["Model", "Spec", "build", "model_types"]


def model_types() -> tuple[str, ...]:
    """Every `model_type` that kt knows."""
    return tuple(sorted(_BUILDERS))


def build(config: Mapping[str, Any]) -> Model:
    """The model that a `config.json` describes.

    Raises:
        BadCheckpoint: unknown architecture, or a field missing, of the wrong type or out of bounds.
    """
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(kind, str) or kind not in _BUILDERS:
        known = ", ".join(model_types())
        raise BadCheckpoint(
            f"unknown architecture: model_type is {str(kind)[:60]!r}",
            hint=f"this version knows {known}",
        )
    return _BUILDERS[kind](config)
