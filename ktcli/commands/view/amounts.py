"""Formats counts of parameters, and past times, for people."""

from __future__ import annotations


def billions(parameters: int) -> str:
    """Returns a number of parameters in words: "30 billion", "0.6 billion", "22 million"."""
    if parameters < 50_000_000:
        return f"{parameters / 1e6:.0f} million"
    return f"{parameters / 1e9:.{0 if parameters >= 1e10 else 1}f} billion"


_UNITS = ((86_400 * 365, "years"), (86_400, "days"), (3_600, "hours"), (60, "minutes"))


def age(seconds: float) -> str:
    """Returns how long ago something was, in words: "3 hours ago" for 11,000 seconds; "just now" below a minute, also
    for a time in the future.
    """
    for length, unit in _UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit if count > 1 else unit[:-1]} ago"
    return "just now"
