"""The part of a pack's manifest about its weights: their recipe, and the permitted files.

The document itself is read and written by `ktcli.manifest`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ktcli import manifest
from ktcli.errors import BadPack, UsageError
from ktcli.manifest import FormatNames, Manifest
from ktcli.native import Codes, Format
from ktcli.ops.part import ModelPart
from ktcli.weights.extras import extra_limit
from ktcli.weights.formats import INT8_BEFORE
from ktcli.weights.recipe import Recipe

_WEIGHTS = re.compile(r"layer-[0-9]{5}\.safetensors|outer\.safetensors")


def format_names(recipe: Recipe) -> FormatNames:
    """Returns what a pack's manifest records of a recipe: the names of its number formats, what each means, and the
    parts stored as f32. `recipe_of` is the inverse."""
    chosen = (recipe.experts, recipe.dense, recipe.down)
    rows = {row.name: _format_row(row) for row in chosen if row}
    in_f32 = tuple(part.value for part in recipe.in_f32)
    return FormatNames(recipe.experts_name, recipe.dense.name, rows, in_f32)


def parse_pack(data: bytes, what: str = manifest.PACK) -> tuple[Manifest, Recipe]:
    """Returns the manifest in `data`, the bytes of a pack's kt.json, and the recipe that it names; errors call the file
    `what`.

    Raises:
        BadPack: `data` is no manifest of a pack, or names formats that this kt does not know.
    """
    try:
        found = manifest.parse(data)
    except manifest.NewerVersion as error:
        raise BadPack(f"{what} {error}", hint=manifest.UPDATE) from None
    except ValueError as error:
        raise BadPack(f"{what} {error}") from None
    if not all(extra_limit(record.name) for record in found.extras):
        raise BadPack(f"{what} lists a file that does not belong there")
    if not all(_WEIGHTS.fullmatch(record.name) for record in found.files):
        raise BadPack(f"{what} lists an invalid weight file")
    assert found.formats is not None  # every manifest of a pack has them
    return found, recipe_of(found.formats, what)


def recipe_of(names: FormatNames, what: str = manifest.PACK) -> Recipe:
    """Returns the recipe that a pack's manifest records; the inverse of `format_names`.

    Raises:
        BadPack: a format is unknown, or this kt defines it differently.
    """

    def read(name: str, named: Callable[[str], Recipe]) -> Recipe:
        try:
            found = _of_the_time(names, named(name))
            rows = [row for row in (found.experts, found.dense, found.down) if row]
            if all(names.rows.get(row.name) == _format_row(row) for row in rows):
                return found
        except UsageError:
            pass
        raise BadPack(
            f"{what} uses the number format {name[:40]!r}, which this version of kt does not support"
        )

    dense = read(names.dense, lambda name: Recipe.named(name, name)).dense
    found = read(names.experts, lambda name: replace(Recipe.named(name), dense=dense))
    parts = {part.value: part for part in ModelPart}
    if unknown := set(names.in_f32) - parts.keys():
        raise BadPack(f"{what} names a part of a model {min(unknown)[:40]!r}, which does not exist")
    return replace(found, in_f32=tuple(parts[name] for name in names.in_f32))


def is_of_before(names: FormatNames) -> bool:
    """Returns whether "int8" in a pack's manifest is the format of that name in older versions of kt, which did not
    rotate weights."""
    return bool(names.rows.get(INT8_BEFORE.name) == _format_row(INT8_BEFORE))


def _of_the_time(names: FormatNames, recipe: Recipe) -> Recipe:
    """The recipe with int8 as it was when the pack was written: of older packs, it has no rotation."""
    if not is_of_before(names):
        return recipe

    def of_then(fmt: Format) -> Format:
        return INT8_BEFORE if fmt.name in (INT8_BEFORE.name, "int8-row") else fmt

    down = None if recipe.down is None else of_then(recipe.down)
    return replace(recipe, experts=of_then(recipe.experts), dense=of_then(recipe.dense), down=down)


def _format_row(row: Format) -> dict[str, Any]:
    return {
        "bits": row.bits,
        "group": row.group,
        "scale": row.scale.name.lower(),
        "codebook": list(row.codebook),
    } | (
        ({"codes": row.codes.name.lower()} if row.codes is not Codes.INTEGER else {})
        | ({"rotation": row.rotation} if row.rotation else {})
    )
