"""Overrides a model's own settings with the arguments of a Python call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ktcli.errors import UsageError
from ktcli.text.settings import Settings, override


def settings_over(
    own: Settings,
    *,
    max_tokens: int | None,
    temperature: float | None,
    stop: str | Sequence[str],
    seed: int | None,
    think: bool | None,
) -> Settings:
    """Returns a model's own settings, overridden by those that were passed; None: the model's own.

    Raises:
        UsageError: a value is out of range.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"stop must be strings, not {str(text)[:40]!r}")
    return replace(
        own,
        sampling=override(own.sampling, temperature=temperature, seed=seed),
        max_tokens=own.max_tokens if max_tokens is None else max_tokens,
        stops=stops or own.stops,
        thinking=own.thinking if think is None else think,
    )
