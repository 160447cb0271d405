"""Conversion for tests that need a pack and are not about conversion."""

from __future__ import annotations

from pathlib import Path

from ktcli.native import Pool
from ktcli.weights.convert import convert
from ktcli.weights.recipe import Recipe


def convert_checkpoint(checkpoint: Path, out: Path, *, experts: str, dense: str) -> Path:
    """The pack of a checkpoint in these formats."""
    convert(checkpoint, out, Recipe.named(experts, dense), Pool(2))
    return out
