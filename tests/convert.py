"""Conversions and repairs of checkpoints by their paths, and conversions for tests that are not about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktcli.native import Pool
from ktcli.weights.conversion import Report
from ktcli.weights.convert import convert_source
from ktcli.weights.reader import source_at
from ktcli.weights.recipe import Recipe
from ktcli.weights.repair import Damage
from ktcli.weights.repair import repair as repair_from


def convert(source: Path, out: Path, recipe: Recipe, pool: Pool, **more: Any) -> Report:
    """The report of a conversion of the checkpoint in a folder or file."""
    with source_at(source, source.name) as opened:
        return convert_source(opened, out, recipe, pool, **more)


def repair(source: Path, damage: Damage, pool: Pool, **more: Any) -> None:
    """Repairs a pack from the checkpoint in a folder or file."""
    with source_at(source, str(source)) as opened:
        repair_from(opened, damage, pool, **more)


def convert_checkpoint(checkpoint: Path, out: Path, *, experts: str, dense: str) -> Path:
    """The pack of a checkpoint in these formats."""
    convert(checkpoint, out, Recipe.named(experts, dense), Pool(2))
    return out
