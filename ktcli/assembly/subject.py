"""Finds the model that `plan` and `bench` are about: known by name, pulled, converted or in a local folder.

Both need only its shape and number formats, so a catalogue name is enough; a pack's own formats count
unless the command line asks for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktcli.assembly.preview import preview
from ktcli.assembly.ready import Ready
from ktcli.errors import BadCheckpoint, UsageError
from ktcli.models import build
from ktcli.records import dataclass
from ktcli.store import adapters, catalog, library
from ktcli.store.catalog import ModelProfile
from ktcli.store.entry import BUILTIN
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse, split_adapter
from ktcli.store.retrying import Tell, silent
from ktcli.weights.gguf.header import gguf_at
from ktcli.weights.pack import Pack
from ktcli.weights.reader import config_of, examine
from ktcli.weights.recipe import Recipe, split_pair
from ktcli.weights.scheme import usual_experts


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that a command is about, by its config and number formats.

    Attributes:
        said: the name as the user gave it, without the adapter.
        name: the name for people, without the adapter.
        config: its `config.json`.
        recipe: its number formats, existing or intended.
        pack: the folder of the conversion with exactly these formats; None: there is none on disk.
        download_bytes: what a pull would fetch; 0: nothing, or it is not known.
        remote: the reference of a repository that is not on disk and not in the catalogue; empty: it is.
        adapter: the adapter of the library that it is used with; empty: none.
    """

    said: str
    name: str
    config: Mapping[str, Any]
    recipe: Recipe
    pack: Path | None = None
    download_bytes: int = 0
    remote: str = ""
    adapter: str = ""

    @property
    def base(self) -> str:
        """The name of the model without its adapter, as the user typed it."""
        return self.said

    @property
    def title(self) -> str:
        """The name of the model for people: "NAME", or "NAME+ADAPTER"."""
        return f"{self.name}+{self.adapter}" if self.adapter else self.name

    @property
    def ready(self) -> Ready | None:
        """The model's conversion on disk with exactly these formats, and its adapter; None: there is no such
        conversion.
        """
        if self.pack is None:
            return None
        return Ready(self.title, self.pack, self.adapter)


def find_with_adapter(
    name: str,
    experts: str | None = None,
    dense: str | None = None,
    *,
    ask_hub: bool = False,
    tell: Tell = silent,
) -> Subject:
    """Returns the config and number formats of the model that a name means, with the adapter that the name adds to it,
    if any; see `find_subject`.

    Raises:
        As `find_subject`.
        NotFound, BadCheckpoint: there is no such adapter, or its manifest is damaged.
    """
    model, said = split_adapter(name)
    found = find_subject(model, experts, dense, ask_hub=ask_hub, tell=tell)
    return replace(found, adapter=adapters.resolve(said).name) if said else found


def find_subject(
    name: str,
    experts: str | None = None,
    dense: str | None = None,
    *,
    ask_hub: bool = False,
    tell: Tell = silent,
) -> Subject:
    """Returns the config and number formats of the model that `name` means: it is looked for on disk first, then in the
    catalogue, then on its hub.

    Args:
        experts, dense: names of number formats to take; None: those that the model has or would get.
        ask_hub: whether a repository that is neither on disk nor in the catalogue is looked at where it is.
        tell: is given a sentence when a hub is waited for, or passed over.
    Raises:
        UsageError: `name` is not a valid name, or there is no such format.
        NotFound: there is no such model on disk or in the catalogue, and no such repository.
        HubError, BadCheckpoint: the hub does not respond, or has no model there that kt can read.
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
        recipe = recipe_of(profile, experts, dense)
        size = profile.download_bytes or 0
        return Subject(name, profile.name, profile.config, recipe, download_bytes=size)
    if ask_hub and entry is None and reference.repository and not reference.formats:
        there = preview(reference, tell=tell)
        recipe = Recipe.named(experts or usual_experts(there.config), dense)
        size, title = there.download_bytes, reference.repository
        return Subject(
            name, title, there.config, recipe, download_bytes=size, remote=reference.text
        )
    entry = entry or library.resolve(name)
    asked = split_pair(reference.formats)  # of a folder: those of a conversion of it
    experts, dense = experts or asked[0] or None, dense or asked[1] or None
    if not entry.in_library and entry.name != BUILTIN and _has_weights(entry.path):
        examine(entry.path)  # as a pull does
    config = config_of(entry.path)
    recipe = Recipe.named(experts or usual_experts(config), dense)
    return Subject(name, entry.name, config, recipe)


def _has_weights(path: Path) -> bool:
    """Returns whether a model outside the library is more than a `config.json` to plan with."""
    kinds = (".safetensors", ".bin", ".pt", ".pth")
    return gguf_at(path) is not None or any(each.suffix in kinds for each in path.iterdir())


def recipe_of(
    profile: ModelProfile, experts: str | None = None, dense: str | None = None
) -> Recipe:
    """Returns the number formats of experts and of dense matrices that the catalogue recommends for a model, unless
    others are asked for.

    Raises:
        UsageError: there is no such format. KtError: the user's own description of the model is not valid.
    """
    try:
        if profile.origin is not None:
            build(profile.config)
        return Recipe.named(experts or profile.experts, dense or profile.dense)
    except (BadCheckpoint, UsageError) as error:
        raise profile.fault(error) from error
