"""Pulls a LoRA adapter from a hub: first its config, which names its base, then the rest; then imports it like any
folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ktcli.adapters.folder import FILES, SEALS, WEIGHTS, read_settings
from ktcli.adapters.record import MAX_BYTES, RECORDS
from ktcli.adapters.settings import CONFIG, MAX_CONFIG_BYTES
from ktcli.assembly.adapters import Described, base_of, import_adapter
from ktcli.assembly.fetch import Bars
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import BadCheckpoint, NotEnoughDisk, NotFound, UsageError, gib, interrupted
from ktcli.smallfiles import free_bytes
from ktcli.store import adapters, integrity
from ktcli.store.download import fetch_files
from ktcli.store.hubs import RemoteFile, Snapshot, hub_named
from ktcli.store.reference import Reference

_LARGEST = {CONFIG: MAX_CONFIG_BYTES, SEALS: MAX_CONFIG_BYTES, **dict.fromkeys(RECORDS, MAX_BYTES)}


def pull_adapter(
    reference: Reference,
    snapshot: Snapshot,
    name: str | None,
    listener: Listener = SILENT,
    *,
    limit_bps: int | None = None,
) -> Described:
    """Downloads a LoRA adapter from a hub into the library; returns its description.

    Args:
        name: the name that the adapter gets; None: that of its repository.
    Raises:
        NotFound: its base is not on disk and not in the catalogue. UsageError: the name is taken.
        BadCheckpoint: it is damaged, hostile, of a kind that kt does not read, or of another base.
        HubError, NotEnoughDisk, Busy, KtError: it cannot be fetched or written.
    """
    name = adapters.require_name(name or snapshot.repository.rpartition("/")[2])
    adapters.require_free(name)
    files = _wanted(snapshot)
    total = sum(file.size_bytes for file in files)
    if 2 * total > (free := free_bytes(adapters.folder())):  # fetched, then copied
        raise NotEnoughDisk(f"pulling {reference.text}", 2 * total, free, str(adapters.folder()))
    said = f"what arrived is kept; continue with: kt pull {reference.text}"
    with interrupted(said), adapters.pulling(name) as stage:
        _fetch(snapshot, [f for f in files if f.name == CONFIG], stage, SILENT, limit_bps)
        base = _base(stage, reference, listener)
        listener.note(f"{snapshot.repository} is an adapter of {base}, {gib(total)}.")
        _fetch(snapshot, files, stage, listener, limit_bps)
        found = import_adapter(stage, name, None, SILENT)
        adapters.pulled(stage)
        return found


def _base(stage: Path, reference: Reference, listener: Listener) -> str:
    """The name of the base that the config in a folder names."""
    settings = read_settings(stage)
    try:
        return base_of(settings, None, listener).name
    except (NotFound, UsageError) as error:
        error.hint = (
            f"get the base with kt pull, then run this again: kt pull {reference.text}; "
            "or download the adapter and name its base: kt adapter import DIR --base MODEL"
        )
        raise


def _wanted(snapshot: Snapshot) -> list[RemoteFile]:
    """The files of a repository that an adapter consists of, or that say how it was trained.

    Raises:
        BadCheckpoint: its weights are not there, or a file is larger than any.
    """
    names = {*FILES, *RECORDS}
    files = [
        file
        for file in snapshot.files
        if file.name in names
        and (file.name not in RECORDS or file.size_bytes <= _LARGEST[file.name])
    ]
    for file in files:
        if file.size_bytes > _LARGEST.get(file.name, file.size_bytes):
            raise BadCheckpoint(
                f"{file.name} of {snapshot.repository} is {gib(file.size_bytes)}; "
                f"the limit is {gib(_LARGEST[file.name])}"
            )
    if WEIGHTS not in {file.name for file in files}:
        raise BadCheckpoint(
            f"{snapshot.repository} has no {WEIGHTS}", hint="kt reads adapters in safetensors only"
        )
    return files


def _is_there(file: RemoteFile, path: Path) -> bool:
    """Returns whether a file arrived in an earlier run, and is what the hub has now."""
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    sha256, blob = integrity.digests(path)
    return file.sha256.lower() in ("", sha256) and file.blob.lower() in ("", blob)


def _fetch(
    snapshot: Snapshot,
    files: Collection[RemoteFile],
    stage: Path,
    listener: Listener,
    limit_bps: int | None,
) -> None:
    """Fetches the files that are not in a folder yet: each has its name only when it is proved."""
    missing = [file for file in files if not _is_there(file, stage / file.name)]
    with Bars(listener) as watcher:
        hub = hub_named(snapshot.hub)
        fetch_files(hub, snapshot, missing, stage, watcher, limit_bps=limit_bps)
