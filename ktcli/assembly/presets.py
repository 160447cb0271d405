"""Overrides a model's settings with the preset of a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktcli.store.preset import Preset
from ktcli.text.settings import Settings

_SYSTEM_ROLES = ("system", "developer")
_SAMPLING = ("temperature", "top-k", "top-p", "min-p", "repetition-penalty", "seed")


def preset_over(preset: Preset, settings: Settings) -> Settings:
    """Returns a model's settings for answers, overridden by the values of a preset; the preset's system text and
    context are not included.
    """
    sampling = {name.replace("-", "_"): preset.get(name) for name in _SAMPLING}
    thinking = preset.get("think")
    return replace(
        settings.sampled(**sampling),
        stops=preset.get("stop") or settings.stops,
        max_tokens=preset.get("max-tokens") or settings.max_tokens,
        thinking=settings.thinking if thinking is None else thinking,
        think_budget=preset.get("think-budget") or settings.think_budget,
    )


def with_system(
    preset: Preset, messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Returns the messages of a conversation, with the system text of a preset in front unless they have one of their
    own.
    """
    system = preset.get("system")
    if not system or any(each.get("role") in _SYSTEM_ROLES for each in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]
