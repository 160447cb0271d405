"""Formats past times for people."""

from __future__ import annotations

_UNITS = ((86_400 * 365, "years"), (86_400, "days"), (3_600, "hours"), (60, "minutes"))


def age(seconds: float) -> str:
    """Returns how long ago a time is, for people; never a time in the future."""
    for length, unit in _UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit if count > 1 else unit[:-1]} ago"
    return "just now"
