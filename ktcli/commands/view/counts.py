"""Formats counts of parameters for people."""

from __future__ import annotations


def billions(parameters: int) -> str:
    """Returns a number of parameters in words: "30 billion", "0.6 billion", "22 million"."""
    if parameters < 50_000_000:
        return f"{parameters / 1e6:.0f} million"
    return f"{parameters / 1e9:.{0 if parameters >= 1e10 else 1}f} billion"
