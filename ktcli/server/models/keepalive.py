"""How long an unused model stays in memory, in Ollama's notation: 5m, 1h30m, 300 (seconds), 0, -1."""

from __future__ import annotations

import math
import re

from ktcli.errors import UsageError
from ktcli.server.models.source import FOREVER

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PART = re.compile(rf"({_NUMBER})(ms|us|µs|ns|h|m|s)", re.ASCII)
_WHOLE = re.compile(rf"([-+]?)((?:{_NUMBER}(?:ms|us|µs|ns|h|m|s))+)", re.ASCII)
_LONGEST_CHARS = 100
_MOST_S = 100 * 365 * 86400.0  # longer means for ever


def keep_seconds(said: str | float, what: str) -> float:
    """Returns a duration in seconds; FOREVER if it is negative or more than a hundred years.

    Args:
        said: a number of seconds, or a text: a number, or numbers with units, such as 1h30m.
        what: the name of the option or field, for errors.
    Raises:
        UsageError: `said` is not a duration.
    """
    seconds = _read(said) if isinstance(said, str) else said
    if seconds is None or math.isnan(seconds):
        raise UsageError(
            f"{what} must be a duration such as 5m, not {str(said)[:40]!r}",
            hint="5m, 1h30m, a number of seconds, 0 to unload at once, or -1 to keep it loaded",
        )
    return FOREVER if seconds < 0 or seconds > _MOST_S else float(seconds)


def _read(said: str) -> float | None:
    text = said.strip()
    if len(text) > _LONGEST_CHARS:
        return None
    if re.fullmatch(rf"[-+]?{_NUMBER}", text, re.ASCII):
        return float(text)
    found = _WHOLE.fullmatch(text)
    if found is None:
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(found[2]))
    return -seconds if found[1] == "-" else seconds
