"""Finds the model that `plan` and `bench` are about: known by name, pulled, converted or in a local folder.

Both need only its shape and number formats, so a catalogue name is enough; a pack's own formats count
unless the command line asks for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktcli.store import catalog, library
from ktcli.store.library import EntryKind
from ktcli.store.reference import parse
from ktcli.weights.pack import Pack
from ktcli.weights.reader import config_of
from ktcli.weights.recipe import Recipe, split_pair


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by its shape.

    Attributes:
        said: the name as the user gave it.
        name: the name for people.
        config: its `config.json`.
        recipe: its number formats, existing or intended.
        pack: the folder of the conversion with exactly these formats; None: there is none on disk.
    """

    said: str
    name: str
    config: Mapping[str, Any]
    recipe: Recipe
    pack: Path | None = None


def find_subject(name: str, experts: str | None = None, dense: str | None = None) -> Subject:
    """Finds the model that `name` means: on disk first, then in the catalogue.

    Args:
        experts, dense: names of formats to take instead of those it has or would get; None: those.
    Raises:
        UsageError: not a name, or no such format.
        NotFound: nothing on disk and not in the catalogue.
    """
    entry = library.find(name)
    if entry is not None and entry.kind is EntryKind.PACK:
        with library.repairable(entry.path):
            pack = Pack.open(entry.path)
        own = pack.recipe
        recipe = own.like(experts or own.experts_name, dense or own.dense.name)
        return Subject(name, entry.name, pack.config, recipe, entry.path if recipe == own else None)
    reference = parse(name)
    # A conversion that was named exactly and is not there is an error, not a reason to assume another.
    known = "" if reference.formats else reference.name
    profile = catalog.find(known if entry is None else entry.name)
    if profile is not None:
        recipe = Recipe.named(experts or profile.experts, dense or profile.dense)
        return Subject(name, profile.name, profile.config, recipe)
    entry = entry or library.resolve(name)
    asked = split_pair(reference.formats)  # of a folder: those of a conversion of it
    experts, dense = experts or asked[0] or None, dense or asked[1] or None
    return Subject(name, entry.name, config_of(entry.path), Recipe.named(experts, dense))
