"""Removes entries of the library and leftovers of killed processes; never follows a link or leaves the library."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from ktcli import config, manifest, smallfiles
from ktcli.errors import Busy, UsageError
from ktcli.store import (
    adapters,
    contents,
    engines,
    heat,
    importances,
    library,
    origins,
    places,
    usage,
)
from ktcli.store.entry import Entry
from ktcli.store.pagefolder import OtherVersion, PageFolder, StoredPages
from ktcli.store.places import EntryKind

# These begin the names of folders of a process, whose number follows.
CALIBRATING, RESUMING = "calibrate-", "resume-"


def remove(entry: Entry) -> int:
    """Deletes the files of an entry of the user's own library; returns the number of bytes freed. The heat map (how
    often each expert was chosen) of its model stays, see `forget`.

    Raises:
        UsageError: the entry is not in the user's own library.
        KtError: the system refuses.
    """
    folder = places.folder_of(entry.kind)
    if not entry.managed or entry.path.parent != folder or entry.path.name in ("", ".", ".."):
        raise UsageError(
            f"{entry.path} is not in the library, so kt will not remove it", hint="use rm"
        )
    freed = 0
    hint = f"check the permissions of the folder: kt path {entry.label}"
    with contents.removing(entry.path, hint):
        if entry.path.is_symlink():
            entry.path.unlink()
            return 0
        for _, status in contents.walk(entry.path):
            freed += status.st_size if status.st_nlink == 1 else 0
        contents.discard(entry.path)
        if entry.kind is EntryKind.PACK:
            usage.forget(entry.path.name)
        if not any(each.name == entry.name for each in library.entries()):
            origins.forget(entry.name)
    return freed


def forget(model: str) -> bool:
    """Deletes the heat map (how often each expert was chosen) and the results of calibrations of a model that has no
    entries in the library any more; returns whether there was a heat map.

    Raises:
        KtError: the system refuses.
    """
    path = heat.path_of(model)
    with contents.removing(path):
        if known := path.is_file():
            with heat.lock(frees=True):  # whoever writes maps looks for a pack first
                path.unlink(missing_ok=True)
        importances.forget(model)
    return known


def pages_of(gone: Collection[Entry], models: Collection[str]) -> tuple[StoredPages, ...]:
    """Returns the stored KV pages to remove together with the conversions `gone`, and those of `models` whose
    conversion is not in the library. Pages that an identical conversion under another name can use stay.

    Args:
        models: names that all conversions of a model share.
    """
    folder = PageFolder.of_library()
    try:
        folder.check()
    except OtherVersion:
        return ()
    packs = {each.path: each.path.name for each in library.entries() if each.formats}
    going = {each.path for each in gone}
    used = {library.identity(path) for path in packs if path not in going} - {""}
    names = {packs[path] for path in going & packs.keys() if library.identity(path) not in used}
    there = set(packs.values())
    return tuple(
        each
        for each in folder.stored()
        if each.conversion in names or (each.model in models and each.conversion not in there)
    )


def leftovers() -> tuple[Path, ...]:
    """Returns the paths of the folders left in the library by interrupted removals, downloads and imports of adapters
    and installations of engines, by killed calibrations and benchmarks, and by complete conversions that were repaired
    or made during a download.
    """
    folders = [places.folder_of(kind) for kind in EntryKind]
    removed = [path for folder in folders for path in sorted(folder.glob(".*.removed.*"))]
    begun = (CALIBRATING, RESUMING)
    found = sorted(path for name in begun for path in config.home().glob(f"{name}[0-9]*-*"))
    stopped = (path for path in found if not smallfiles.is_running(path.name.split("-")[1]))
    return (*removed, *stopped, *_streams(), *adapters.leftovers(), *engines.leftovers())


def _streams() -> Iterator[Path]:
    """The folders that were used to make conversions, or to repair them, that are complete now."""
    for path in places.folder_of(EntryKind.PACK).glob(f"*/{manifest.STREAM}"):
        lock = places.lock_path(path.parent.name.partition("@")[0])
        if (path.parent / manifest.PACK).is_file() and smallfiles.holder(lock) is None:
            yield path


def drop_stream(entry: Entry) -> None:
    """Deletes the working folder of a complete conversion that was made during a download, or repaired, if a process
    that was killed at its very end left it; does nothing while another process works on the model.
    """
    if not (entry.managed and entry.complete and entry.is_stream):
        return
    with (
        contextlib.suppress(Busy),
        smallfiles.lock(places.lock_path(entry.name), f"tidying {entry.label}"),
    ):
        shutil.rmtree(entry.path / manifest.STREAM, ignore_errors=True)


def calibrating_folder(key: str) -> Path:
    """Returns the path of this process's working folder for a calibration, which need not exist; that of a stopped
    process with the same calibration is renamed to it, if there is one.

    Args:
        key: names the calibration, with letters and digits.
    """
    own = config.home() / f"{CALIBRATING}{os.getpid()}-{key}"
    for path in sorted(config.home().glob(f"{CALIBRATING}[0-9]*-{key}")):
        if not own.exists() and not smallfiles.is_running(path.name.split("-")[1]):
            with contextlib.suppress(OSError):  # another process was faster
                path.rename(own)
    return own


def remove_leftovers() -> int:
    """Deletes the folders that `leftovers` finds; returns the number of bytes freed."""
    freed = 0
    for path in leftovers():
        freed += contents.bytes_below(path)
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return freed
