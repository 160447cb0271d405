"""Converts a checkpoint: chooses formats and folder, and creates the pack while holding the model's lock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktcli import manifest, smallfiles
from ktcli.assembly.listener import SILENT, Listener, announce_library
from ktcli.assembly.ready import newest_ns
from ktcli.errors import UsageError, interrupted
from ktcli.store import catalog, contents, library, origins, places
from ktcli.store.entry import BUILTIN, Entry
from ktcli.store.places import EntryKind
from ktcli.weights.checkpoint import read_config
from ktcli.weights.gguf.header import gguf_at
from ktcli.weights.recipe import Recipe, split_pair
from ktcli.weights.scheme import loss_of, usual_experts

if TYPE_CHECKING:
    from ktcli.assembly.merging import MergedBase
    from ktcli.weights.conversion import Calibration, Provenance, Report


def recipe_for(entry: Entry, experts: str | None = None, dense: str | None = None) -> Recipe:
    """Returns the number formats of a conversion: those asked for, else those of the catalogue, else those that suit
    the checkpoint's own format, else the defaults. Raises UsageError if there is no format of such a name.
    """
    profile = catalog.find(entry.name)
    if profile is not None:
        experts, dense = experts or profile.experts, dense or profile.dense
    return Recipe.named(experts or usual_experts(_config(entry)), dense)


def _config(entry: Entry) -> Mapping[str, Any]:
    """The `config.json` of a folder; {} where there is none."""
    here = gguf_at(entry.path) is None and (entry.path / "config.json").is_file()
    return read_config(entry.path) if here else {}


def recipe_named(entry: Entry, formats: str) -> Recipe:
    """Returns the recipe (number formats) that `formats`, "<experts>-<dense>", names; where one or both names are
    missing, `recipe_for` chooses; raises as it.
    """
    experts, dense = split_pair(formats)
    return recipe_for(entry, experts or None, dense or None)


def convert_entry(
    entry: Entry,
    recipe: Recipe,
    target: Path | None = None,
    *,
    threads: int | None = None,
    calibration: Calibration | None = None,
    merged: MergedBase | None = None,
    listener: Listener = SILENT,
) -> Report:
    """Converts a model into the folder `target` (None: into the library); returns the report of the conversion.

    Args:
        merged: opens the checkpoint with an adapter in its weights; None: as it is.
    Raises:
        UsageError: the recipe says that it is calibrated, and nothing says how. Others: as `weights.convert_source`.
    """
    _require_calibration(entry, recipe, calibration)
    from ktcli.assembly.host import team_to_convert
    from ktcli.weights import convert as weights
    from ktcli.weights.reader import source_at

    if said := loss_of(_config(entry), recipe.experts.name):
        listener.note(f"{entry.shown}: {said}")
    managed = target is None
    if target is None:
        target = merged.pack_folder(recipe) if merged else pack_folder(entry, recipe)
    what = f"converting {entry.shown}"
    held: AbstractContextManager[None] = contextlib.nullcontext()
    if managed:
        announce_library(listener)
        held = _held(entry, target, what)
    with (
        library.repairable(target),
        held,
        listener.progress(f"Converting {entry.shown}") as bar,
        interrupted("completed files are kept; run the same command again to continue"),
        merged.opened(recipe) if merged else source_at(entry.path, entry.path.name) as source,
    ):
        report = weights.convert_source(
            source,
            target,
            recipe,
            team_to_convert(threads),
            progress=lambda done, total: bar.update(done=done, total=total),
            provenance=provenance_of(entry.path),
            calibration=calibration,
        )
    for remark in report.remarks:
        listener.warn(remark)
    return report


def _require_calibration(entry: Entry, recipe: Recipe, calibration: Calibration | None) -> None:
    if recipe.calibrated and calibration is None:
        raise UsageError(
            f"{recipe.experts_name} needs a calibration, and the library has none of {entry.shown}",
            hint=f"name one: kt convert {entry.label}@{recipe.name} --calibrate FILE",
        )


@contextlib.contextmanager
def _held(entry: Entry, target: Path, what: str) -> Iterator[None]:
    """Holds the lock on the model's files in the library; the origin of one from outside is recorded first."""
    name = target.name.partition("@")[0]
    with smallfiles.lock(places.lock_path(name), what):
        if name.startswith(places.LOCAL):
            origins.note(name, entry.path, entry.spoken)
        yield


def pack_folder(entry: Entry, recipe: Recipe) -> Path:
    """Returns the path that a model's conversion to a recipe has in the library; models from outside the library are
    told apart by path, age and a sample of their bytes.
    """
    return places.pack_path(name_of_packs(entry), recipe.experts_name, recipe.dense.name)


def name_of_packs(entry: Entry) -> str:
    """Returns the name under which the library has all conversions of a checkpoint; a name made of path, age and a
    sample of bytes for one outside the library.
    """
    if entry.in_library or entry.name == BUILTIN:
        return entry.name
    file = gguf_at(entry.path)
    sample = contents.sample(contents.weights(entry.path) if file is None else contents.parts(file))
    return places.local_name(entry.path, f"{newest_ns(entry.path)} {sample}", entry.spoken)


def conversions_outside(entry: Entry) -> list[Entry]:
    """Returns the library's conversions of a checkpoint that lies outside the library; empty for a pack or a checkpoint
    in the library.
    """
    if entry.kind is EntryKind.PACK or (name := name_of_packs(entry)) == entry.name:
        return []
    return [each for each in library.entries() if each.name == name]


def require_known_tokenizer(path: Path) -> None:
    """Raises an error if a checkpoint's tokenizer has parts that no published tokenizer has, which a chat would refuse;
    a checkpoint without a tokenizer passes.

    Args:
        path: a folder, or a GGUF file.
    Raises:
        BadCheckpoint: its tokenizer has such a part.
    """
    from ktcli.text.tokenizer import examine_tokenizer
    from ktcli.weights.reader import small_files_of

    with small_files_of(path) as folder:
        examine_tokenizer(folder)


def provenance_of(path: Path) -> Provenance:
    """Returns where a checkpoint was published: hub, repository and revision, "gguf" and the name of a GGUF file, or an
    empty Provenance if unknown.
    """
    from ktcli.weights.conversion import Provenance

    source = manifest.read(path / manifest.CHECKPOINT)
    if source is None and (file := gguf_at(path)) is not None:
        return Provenance("gguf", file.name)
    if source is None:
        return Provenance()
    parts = (source.hub, source.repository, source.revision)
    return Provenance(*(part or None for part in parts))
