"""Connects adapters with base models: finds the base of an adapter, imports, opens and writes adapters."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.adapters.adapter import Adapter, combined
from ktcli.adapters.export import AdapterLayout, Exporter
from ktcli.adapters.folder import FILES, open_adapter, read_settings
from ktcli.adapters.measure import PartSummary, summarised
from ktcli.adapters.record import records_of, trained_on
from ktcli.adapters.settings import CONFIG, AdapterSettings
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import KtError, NotFound, UsageError, hinted, interrupted
from ktcli.models import Model, build
from ktcli.ops.part import ModelPart
from ktcli.records import dataclass
from ktcli.store import adapters, catalog, library
from ktcli.store.adapters import AdapterEntry
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import parse
from ktcli.weights.pack import Pack
from ktcli.weights.reader import config_of

# In a path of the hub's cache.
_CACHED = re.compile(r"models--([A-Za-z0-9._-]+?)--([A-Za-z0-9._-]+)")
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+", re.ASCII)  # a trainer's folder, which says nothing


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base of an adapter, by its config: no weights are needed.

    Attributes:
        said: the text that means it from every folder.
        name: its name for people.
    """

    said: str
    name: str
    model: Model


@dataclass(frozen=True, slots=True)
class Described:
    """The description of an adapter for the user.

    Attributes:
        name: in the library; empty: it does not lie there.
        trained_on: the names of data sets.
    """

    name: str
    folder: Path
    base: BaseModel
    settings: AdapterSettings
    parts: tuple[PartSummary, ...]
    gains: int
    size_bytes: int
    trained_on: tuple[str, ...]
    dtypes: tuple[str, ...]


def base_of(settings: AdapterSettings, asked: str | None, listener: Listener = SILENT) -> BaseModel:
    """Returns the base model of a LoRA adapter, built from its config without weights.

    Args:
        asked: the name that the user gave; None: the one that its config has counts.
    Raises:
        NotFound, UsageError: the base model is not named, or not on disk and not in the catalogue.
    """
    if asked is not None:
        found = _base_named(asked)
        compare_base(settings.base, found, listener)
        return found
    if not settings.base:
        raise UsageError(
            f"{CONFIG} does not name a base model", hint="name it: --base MODEL (kt list --all)"
        )
    for text in _readings(settings.base):
        try:
            found = _base_named(text)
        except (NotFound, UsageError):
            continue
        if text != settings.base:
            listener.warn(
                f"{CONFIG} names {settings.base} as the base; kt uses {found.name}, which has that name"
            )
        return found
    raise NotFound(
        f"the base model {settings.base[:200]!r}, which {CONFIG} names, is not on disk and not in the catalogue",
        hint="name it with --base MODEL, or get it with kt pull",
    )


def _readings(base: str) -> list[str]:
    """What the author's name of a base can mean here: itself, or the end of a path on the author's machine."""
    found = [base]
    if cached := _CACHED.search(base):
        found.append(f"{cached[1]}/{cached[2]}")
    last = base.rstrip("/").rpartition("/")[2].lower()
    return [*found, last] if last and last != base and catalog.find(last) else found


def _base_named(text: str) -> BaseModel:
    """The model that a text means: what lies on disk, else the catalogue's profile."""
    reference, entry = parse(text), library.find(text)
    if entry is None:
        profile = catalog.find(reference.name) if reference.folder is None else None
        if profile is None:
            library.resolve(text)  # raises, with the nearest names
            raise NotFound(f"there is no model {text[:200]!r}")
        return BaseModel(profile.name, profile.name, build(profile.config))
    return BaseModel(reference.lasting, entry.shown, build(_config_of(entry)))


def _config_of(entry: Entry) -> Mapping[str, Any]:
    if entry.kind is not EntryKind.PACK:
        return config_of(entry.path)
    with library.repairable(entry.path):
        return Pack.open(entry.path).config


def compare_base(said: str, found: BaseModel, listener: Listener) -> None:
    """Warns the listener if `said`, the base model that an adapter's config names, is not the base model `found`; an
    empty `said` passes.
    """
    if said and not any(_is_it(text, found) for text in _readings(said)):
        listener.warn(
            f"{CONFIG} names {said} as the base, not {found.name}: only shapes are compared, and another model with "
            "the same shapes gives different answers"
        )


def _is_it(text: str, found: BaseModel) -> bool:
    """Returns whether a name means a base that was found."""
    try:
        named = parse(text)
    except KtError:
        return False
    here = named.lasting == found.said or named.name == found.name
    return here or (named.folder is not None and named.folder.name == found.name)


# --- finding ----------------------------------------------------------------------------------------


def located(text: str) -> tuple[AdapterEntry | None, Path]:
    """Returns an adapter's entry in the library and its folder. A text with a slash, or a dot or tilde in front, is a
    path, which is not looked at, and its entry None if it is not in the library; any other text is a name there.

    Raises:
        NotFound: the library has no adapter of this name. BadCheckpoint: its manifest is damaged.
    """
    if "/" in text or text.startswith((".", "~")):
        folder = Path(os.path.expanduser(text)).absolute()
        return next((e for e in adapters.every() if e.path == folder), None), folder
    try:
        entry = adapters.resolve(text)
    except NotFound as error:
        if Path(text).is_dir():
            error.hint = f"to name a folder, use a slash: ./{text}"
        raise
    return entry, entry.path


def opened(
    text: str, asked: str | None, listener: Listener = SILENT
) -> tuple[AdapterEntry | None, BaseModel, Adapter]:
    """Returns an opened adapter with its entry in the library (None for a folder elsewhere) and its base model; the
    caller closes the adapter.

    Raises:
        NotFound, UsageError: there is no such adapter, or its base is not known.
        BadCheckpoint: it is damaged, or not for this base.
    """
    entry, folder = located(text)
    settings = read_settings(folder)
    base = base_of(settings, asked or (entry.base if entry else None) or None, listener)
    with hinted(f"for another base model: --base MODEL; this is {base.name}"):
        return entry, base, open_adapter(folder, base.model)


def described(text: str, asked: str | None, listener: Listener = SILENT) -> Described:
    """Returns the description of an adapter for the user: its base model, settings, parts, size, data sets and number
    types; every number of the adapter is read.

    Raises:
        As `opened`.
    """
    entry, base, adapter = opened(text, asked, listener)
    with adapter:
        for note in adapter.notes:
            listener.warn(note)
        return _described(entry.name if entry else "", adapter, base)


def _described(name: str, adapter: Adapter, base: BaseModel) -> Described:
    return Described(
        name,
        adapter.folder,
        base,
        adapter.settings,
        summarised(adapter),
        len(adapter.gains),
        adapter.size_bytes,
        trained_on(adapter.folder),
        tuple(sorted({pair.dtype for pair in adapter.pairs})),
    )


def digest_of(entry: AdapterEntry) -> str:
    """Returns the digest of an adapter in the library, equal to `Adapter.digest`, computed from the SHA-256 sums in its
    manifest without reading its files.
    """
    known = {record.name: record.sha256 for record in entry.records}
    return combined((name, known[name]) for name in FILES if name in known)


# --- importing, writing -----------------------------------------------------------------------------


def usual_name(folder: Path) -> str:
    """Returns the default name of an adapter: that of its folder, or of the folder above a trainer's checkpoint.

    Raises:
        UsageError: an adapter cannot have this name.
    """
    here = folder.absolute()
    return adapters.require_name(
        here.parent.name if _CHECKPOINT.fullmatch(here.name) else here.name
    )


def import_adapter(
    folder: Path, name: str | None, asked: str | None, listener: Listener = SILENT
) -> Described:
    """Copies an adapter from a folder into the library after checking it; returns its description.

    Raises:
        NotFound, UsageError: there is no adapter in the folder, its base is not known, or the name is taken.
        BadCheckpoint: it is damaged, hostile, of a kind that kt does not read, or of another base.
        NotEnoughDisk, Busy, KtError: it cannot be written.
    """
    settings = read_settings(folder)
    name = usual_name(folder) if name is None else adapters.require_name(name)
    base = base_of(settings, asked, listener)
    with open_adapter(folder, base.model) as adapter:
        names = [*adapter.names, *records_of(folder)]
        for note in adapter.notes:
            listener.warn(note)
    total = sum((folder / each).stat().st_size for each in names)
    with (
        interrupted("nothing was imported; run the same command again"),
        adapters.arriving(name) as stage,
        listener.progress(f"Importing {name}", total) as bar,
    ):
        records = adapters.copy(folder, stage, names, bar.advance)
        with open_adapter(stage, base.model) as copied:  # what was copied, not what was looked at
            found = _described(name, copied, base)
        entry = adapters.complete(stage, name, base.said, records)
    return replace(found, folder=entry.path, settings=settings)


def write_adapter(
    text: str, folder: Path, layout: AdapterLayout, asked: str | None, listener: Listener = SILENT
) -> tuple[str, ...]:
    """Writes an adapter into a new folder in another file layout; returns the sorted names of the files written.

    Raises:
        UsageError: the folder is there and not empty, or the layout cannot express the adapter.
        NotFound, BadCheckpoint: as `opened`. KtError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not an empty folder", hint="name a folder that does not exist"
        )
    _, base, adapter = opened(text, asked, listener)
    with adapter:
        if layout is AdapterLayout.EACH and _misread(adapter, base):
            listener.warn(
                "if the base has shared experts, peft misreads modules for each expert; "
                "to load it with peft, use --layout peft"
            )
        return _staged(folder, lambda stage: Exporter(adapter, base.model).write(stage, layout))


def _misread(adapter: Adapter, base: BaseModel) -> bool:
    """Returns whether peft would map modules of shared experts to routed ones."""
    parts = {tensor.part for tensor in base.model.tensors}
    return ModelPart.SHARED in parts and ModelPart.EXPERTS in adapter.parts


def _staged(folder: Path, write: Callable[[Path], None]) -> tuple[str, ...]:
    """Lets a folder be written beside its name, which it gets when it is complete."""
    target = folder.absolute()
    stage = target.with_name(f".{target.name}.{os.getpid()}{smallfiles.SUFFIX}")
    try:
        with interrupted("nothing was written"):
            stage.mkdir(parents=True)
            write(stage)
            if target.exists():
                target.rmdir()
            stage.rename(target)
    except OSError as error:
        raise KtError(
            f"cannot write {error.filename or target}: {error.strerror}",
            hint="name a folder on a disk with free space",
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return tuple(sorted(path.name for path in target.iterdir()))
