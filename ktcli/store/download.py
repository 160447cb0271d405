"""Pulls a repository into the library: selects files, checks the room, fetches, verifies, records.

Only data is taken: safetensors, JSON, templates, tokenizer files, the licence. Python files and pickled
weights stay where they are. Hashes are computed from what is on disk and compared with the hub's; only
when all agree the manifest appears, and with it the model. Whatever interrupts a pull, the next one goes
on: the hub clients keep partial files, and hashes already computed are kept beside them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ktcli import config, manifest, smallfiles
from ktcli.errors import BadCheckpoint, HubError, NotEnoughDisk, UsageError
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import integrity, library
from ktcli.store.hubs import Hub, RemoteFile, Snapshot, hub_of
from ktcli.store.library import Entry, EntryKind
from ktcli.store.reference import Reference

# Files at the top of a repository that a model needs. Copies of the weights in other layouts
# ("consolidated…", subfolders) are left out, and so is whatever would pass for a manifest of ours.
WANTED = re.compile(
    r"(?!consolidated|kt-source\.json|kt\.json)[\w.-]+\.(safetensors|json|jinja|tiktoken)|(tokenizer|tiktoken|spiece)\.model"
    r"|merges\.txt|vocab\.txt|LICENSE[\w.-]*|NOTICE[\w.-]*",
    re.ASCII,
)
# Room that must stay free for the system and for our own bookkeeping.
SPARE_BYTES = 256 << 20
_HASHES = "kt-hashes.part"


class Watcher(Protocol):
    """A listener that is told how a pull goes on; every method may do nothing."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def end(self) -> None: ...


def pull(reference: Reference, watcher: Watcher, *, hub: Hub | None = None) -> Entry:
    """Bring a repository into the library; return at once if it is there.

    Args:
        hub: where to get it from; None: the hub of the reference.
    Raises:
        UsageError: the reference names no repository.
        Busy: another process is pulling it.
        NotFound, HubError, NotEnoughDisk, BadCheckpoint: what stopped it.
    """
    if not reference.repository:
        raise UsageError(
            f"{reference.text} names no repository",
            hint="write org/repo, or a short name (kt list --all)",
        )
    present = library.find(reference.name, EntryKind.CHECKPOINT)
    if present is not None:
        return present
    folder = library.checkpoint_path(reference.name)
    with smallfiles.lock(library.lock_path(reference.name), f"pulling {reference.name}"):
        present = library.find(reference.name, EntryKind.CHECKPOINT)
        if present is not None:
            return present
        client = hub or hub_of(reference)
        snapshot = client.look(reference.repository, reference.revision)
        files = wanted(snapshot)
        _check_space(reference, files, folder)
        smallfiles.make_folder(folder)
        origin = f"@{reference.revision}" if reference.revision else ""
        text = f"{snapshot.hub}:{snapshot.repository}{origin}"
        smallfiles.write(folder / library.PULLING, text)
        _fetch(client, snapshot, files, folder, watcher)
        _record(snapshot, files, folder, watcher)
    return library.resolve(reference.name, EntryKind.CHECKPOINT)


def wanted(snapshot: Snapshot) -> tuple[RemoteFile, ...]:
    """The files of a repository that kt takes.

    Raises:
        BadCheckpoint: there is no model among them that kt could read.
    """
    files = tuple(file for file in snapshot.files if WANTED.fullmatch(file.name))
    names = {file.name for file in files}
    if not any(name.endswith(".safetensors") for name in names):
        others = {Path(file.name).suffix for file in snapshot.files} & {
            ".bin",
            ".pt",
            ".pth",
            ".gguf",
        }
        only = f", only {', '.join(sorted(others))} files" if others else ""
        raise BadCheckpoint(
            f"{snapshot.repository} has no safetensors weights{only}",
            hint="look for a repository that has them"
            + (
                ", or download one .gguf file and name it: kt chat ./FILE.gguf"
                if ".gguf" in others
                else ""
            ),
        )
    if "config.json" not in names:
        raise BadCheckpoint(
            f"{snapshot.repository} has no config.json, so it is not a model kt can read"
        )
    return files


def _check_space(reference: Reference, files: tuple[RemoteFile, ...], folder: Path) -> None:
    """Refuse before the first byte if the rest does not fit."""
    total = sum(file.size_bytes for file in files)
    need = max(0, total - _bytes_in(folder)) + SPARE_BYTES
    free = smallfiles.free_bytes(folder)
    if need > free:
        raise NotEnoughDisk(f"pulling {reference.name}", need, free, str(config.home()))


def _fetch(
    hub: Hub, snapshot: Snapshot, files: tuple[RemoteFile, ...], folder: Path, watcher: Watcher
) -> None:
    total, done = sum(file.size_bytes for file in files), _bytes_in(folder)
    watcher.begin(f"Pulling {snapshot.repository}", total, done)
    names = [file.name for file in files]
    with _watched(folder, watcher, done):
        _interruptible(lambda: hub.fetch(snapshot, names, folder))
    watcher.end()


def _bytes_in(folder: Path) -> int:
    return sum(status.st_size for _, status in library.walk(folder))


def _interruptible(work: Callable[[], None]) -> None:
    """Run `work` so that Ctrl-C returns at once.

    A client that is interrupted waits for its running files to end, which can take an hour. It gets a
    thread of its own instead, which is left behind: the program ends without waiting for it.
    """
    failed: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # raised again below, in the thread that asked
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True)
    streams = sys.stdout, sys.stderr
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        sys.stdout, sys.stderr = streams  # the thread goes on talking to nobody, we do not
        raise
    if failed:
        raise failed[0]


@contextmanager
def _watched(folder: Path, watcher: Watcher, done: int) -> Iterator[None]:
    """Reports progress by the growth of a folder, which holds for every client and way of transfer."""
    stop = threading.Event()

    def follow() -> None:
        seen = done
        while True:
            ended = stop.wait(0.25)
            now = _bytes_in(folder)
            if now > seen:
                watcher.advance(now - seen)
                seen = now
            if ended:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _record(
    snapshot: Snapshot, files: tuple[RemoteFile, ...], folder: Path, watcher: Watcher
) -> None:
    """Hash everything, compare, and write the manifest."""
    watcher.begin("Checking hashes", sum(file.size_bytes for file in files), 0)
    known = _known_hashes(folder)
    records = []
    with (folder / _HASHES).open("a", encoding="utf-8") as log:
        for file in files:
            records.append(_check_file(file, folder, known, watcher))
            log.write(json.dumps([*_identity(folder / file.name), records[-1].sha256]) + "\n")
            log.flush()
    watcher.end()
    found = Manifest(tuple(records), snapshot.hub, snapshot.repository, snapshot.revision)
    smallfiles.write(folder / manifest.CHECKPOINT, found.encode())
    for mine in (_HASHES, library.PULLING):
        (folder / mine).unlink(missing_ok=True)
    for client_folder in (".cache", "._____temp", ".msc", ".mv", ".mdl"):
        path = folder / client_folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _check_file(
    file: RemoteFile, folder: Path, known: dict[str, str], watcher: Watcher
) -> FileRecord:
    path = folder / file.name
    try:
        size = path.stat().st_size
        sha256 = known.get(json.dumps(_identity(path)))
        if sha256 is None:
            sha256 = integrity.digest(path, watcher.advance)
        else:
            watcher.advance(size)
    except FileNotFoundError:
        raise HubError(
            f"{file.name} did not arrive", hint="run the same command again; it continues"
        ) from None
    if (file.size_bytes and size != file.size_bytes) or (
        file.sha256 and sha256 != file.sha256.lower()
    ):
        path.unlink()
        raise HubError(
            f"{file.name} arrived damaged (its size or SHA-256 is not the hub's) and was removed",
            hint="run the same command again; it fetches only this file",
        )
    return FileRecord(file.name, size, sha256)


def _identity(path: Path) -> list[str | int]:
    """Values of a file that change when it does."""
    status = os.stat(path)
    return [path.name, status.st_size, status.st_mtime_ns]


def _known_hashes(folder: Path) -> dict[str, str]:
    """The hashes that an interrupted check had already computed, by the file's `_identity`."""
    known = {}
    try:
        for line in (folder / _HASHES).read_text(encoding="utf-8").splitlines():
            *identity, sha256 = json.loads(line)
            known[json.dumps(identity)] = str(sha256)
    except (OSError, ValueError):
        return known  # a line that was cut off: what came before it holds
    return known
