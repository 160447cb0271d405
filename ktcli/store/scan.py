"""Reads entries from disk: the folders of the library, the built-in model, a folder or file by its path."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ktcli import config, manifest, smallfiles
from ktcli.errors import BadCheckpoint, KtError, NotFound
from ktcli.ggufname import GGUF, is_gguf, is_model
from ktcli.numbered import numbered_set
from ktcli.store import catalog, origins
from ktcli.store.entry import BUILTIN, INTERRUPTED, Entry
from ktcli.store.places import LOCAL, EntryKind, folder_of, lock_path, shared_with

MAX_REFERENCE_BYTES = 4096
# In an entry's folder while it is imported: how to go on, see `bundlereader`.
IMPORTING = "kt-import.part"
PULLING = "kt-pull.part"  # in a checkpoint's folder while it is pulled: the reference to pull again


def entries_of(kind: EntryKind) -> Iterator[Entry]:
    """Yields the entries of one kind (checkpoints or packs) in the user's own library, by name, then those of each
    further library that can be read.

    Raises:
        KtError: the user's own library cannot be read.
    """
    yield from _entries_in(folder_of(kind), kind, None)
    for library in config.libraries():
        if not unreadable(library):
            yield from _entries_in(folder_of(kind, library), kind, library)


def unreadable(library: Path) -> str:
    """Returns a sentence that says why a further library, at this path, cannot be read; empty: it can."""
    for folder in (library, *(folder_of(kind, library) for kind in EntryKind)):
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            if folder == library:
                return f"the library {library} does not exist; is its disk mounted?"
        except OSError as error:
            return f"the library {library} cannot be read: {error.strerror}"
    return ""


def _entries_in(folder: Path, kind: EntryKind, shared: Path | None) -> Iterator[Entry]:
    try:
        items = sorted(os.scandir(folder), key=lambda item: item.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise KtError(
            f"cannot read the library folder {folder}: {error.strerror}",
            hint="check its permissions, or set KT_HOME to another folder",
        ) from error
    for item in items:
        if not item.name.startswith(".") and item.is_dir():
            yield entry_at(Path(item.path), kind, shared)


def entry_at(path: Path, kind: EntryKind, shared: Path | None = None) -> Entry:
    """Returns the library entry of one folder, which lies in the user's own library, or in the further library
    `shared`; it may be incomplete.
    """
    found = _entry_at(path, kind, lock_path(path.name.partition("@")[0], shared))
    return replace(found, managed=False, shared=shared) if shared else found


def _entry_at(path: Path, kind: EntryKind, lock: Path) -> Entry:
    name, _, formats = path.name.partition("@")
    try:
        source = manifest.read(path / kind.manifest)
    except BadCheckpoint as error:
        return Entry(name, kind, path, str(error), formats)
    if kind is EntryKind.PACK and name.startswith(LOCAL):
        origin = origins.shown(name)
    elif source is not None:
        origin = source.origin
    else:
        begun = path / manifest.STREAM if kind is EntryKind.PACK else path
        origin = _pulling(begun / PULLING)
    held = smallfiles.holder(path / manifest.LOCK if kind is EntryKind.PACK else lock)
    if held is None and kind is EntryKind.PACK and (path / manifest.STREAM).is_dir():
        held = smallfiles.holder(lock)  # still reads headers
    if source is not None:
        return Entry(name, kind, path, "", formats, origin or source.origin, work=held)
    problem = f"process {held.process} is {held.doing}" if held else INTERRUPTED
    return Entry(name, kind, path, problem, formats, origin, work=held, importing=_importing(path))


def _importing(path: Path) -> str:
    """The arguments of the import that was interrupted; empty if none was."""
    words = smallfiles.known_object(path / IMPORTING, MAX_REFERENCE_BYTES).get("arguments")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def _pulling(path: Path) -> str:
    """The reference that an interrupted pull left; empty if it left none."""
    try:
        data = smallfiles.read_bounded(path, MAX_REFERENCE_BYTES)
        return data.decode("utf-8", "replace").strip()
    except OSError:
        return ""


def builtin_entry() -> Entry | None:
    """Returns the entry of the small model that ships with kt; None if its files are not there."""
    profile = catalog.find(BUILTIN)
    if profile is None:
        return None
    try:
        path = catalog.builtin_path(profile.builtin)
    except NotFound:
        return None
    if not (path / "config.json").is_file():
        return None
    return Entry(BUILTIN, EntryKind.CHECKPOINT, path, source="built in", managed=False)


def local_entry(folder: Path) -> Entry:
    """Returns the entry of the model in a folder or GGUF file that a user named, in the library or not.

    Raises:
        NotFound: the folder is not there, or has no model, or several. BadCheckpoint: the model's manifest is damaged.
    """
    try:
        mode = folder.stat().st_mode
        if stat.S_ISREG(mode) and is_gguf(folder.name):
            return Entry(folder.name, EntryKind.CHECKPOINT, folder, managed=False)
        if not stat.S_ISDIR(mode):
            raise NotFound(
                f"{folder} is not a folder",
                hint="give the folder that contains config.json or kt.json, or a .gguf file",
            )
        pack, checkpoint = (folder / manifest.PACK).is_file(), (folder / "config.json").is_file()
    except OSError as error:
        raise NotFound(f"cannot read {folder}: {error.strerror}") from error
    if not pack and not checkpoint:
        files = sorted(each for each in folder.glob(f"[!.]*{GGUF}") if is_model(each.name))
        sets = {numbered_set(each.name)[0]: each for each in reversed(files)}
        if len(sets) == 1:
            return local_entry(files[0])
        what = (
            f"there are {len(sets)} models in {folder}"
            if sets
            else f"there is no model in {folder}"
        )
        hint = (
            f"name the file: {files[0]}"
            if sets
            else "a model's folder contains config.json or kt.json"
        )
        raise NotFound(what, hint=hint)
    kind = EntryKind.PACK if pack else EntryKind.CHECKPOINT
    source = manifest.read(folder / kind.manifest)
    shared = shared_with(folder)
    if shared or folder.parent == folder_of(kind):
        return entry_at(folder, kind, shared)
    formats, origin = (source.formats_label, source.origin) if source else ("", "")
    return Entry(folder.name, kind, folder, "", formats, origin, managed=False)
