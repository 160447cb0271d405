"""Pulls a repository into the library: selects files, checks the free space, downloads, verifies, records.

Only data is taken: safetensors, JSON, templates, tokenizer files, the licence. Python files and pickled
weights stay where they are. Each file is compared with the hub's hash before it gets its name; only when
all have theirs the manifest appears, and with it the model. Whatever interrupts a pull, the next one goes
on: partial files lie in `.kt-pull`, with the hashes of the files that are complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ktcli import config, manifest, smallfiles
from ktcli.errors import BadCheckpoint, HubError, UsageError
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import contents, integrity, library, places, scan
from ktcli.store.choice import look
from ktcli.store.entry import Entry
from ktcli.store.huberrors import explained
from ktcli.store.hubs import Hub, RemoteFile, Snapshot, hub_named
from ktcli.store.partial import Located
from ktcli.store.places import EntryKind
from ktcli.store.quants import choose, quant_named, quants_of
from ktcli.store.reference import Reference
from ktcli.store.transfer import Arrived, Transfer

# Files at the top of a repository that a model needs. Copies of the weights in other layouts
# ("consolidated…", subfolders) are left out, and so is whatever would pass for a manifest of ours.
WANTED = re.compile(
    r"(?!consolidated|kt-source\.json|kt\.json)[\w.-]+\.(safetensors|json|jinja|tiktoken)|(tokenizer|tiktoken|spiece)\.model"
    r"|merges\.txt|vocab\.txt|LICENSE[\w.-]*|NOTICE[\w.-]*|[0-9]{1,2}_Pooling/config\.json",
    re.ASCII,
)
_NOTICES = re.compile(r"(LICENSE|NOTICE)[\w.-]{0,100}", re.ASCII)
# Room that must stay free for the system and for our own bookkeeping.
SPARE_BYTES = 256 << 20
_ADAPTER = "adapter_config.json"
_OF_ADAPTERS = ("adapter_", "fused_expert_lora")  # begin the names of their weights
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"  # which say what else is needed
SCRATCH = ".kt-pull"  # in the folder of a checkpoint while it is pulled
_HASHES = "hashes"
# What the hubs' clients, and kt when it still used them to fetch, leave in a folder.
_OF_CLIENTS = (".cache", "._____temp", ".msc", ".mv", ".mdl", "kt-hashes.part")
_LONGEST_NAME = 200  # bytes; of 255 that most file systems take, with what is added meanwhile


Files = tuple[RemoteFile, ...]


class HoldsAdapter(BadCheckpoint):
    """A repository is a LoRA adapter, not a model.

    Args:
        snapshot: what the hub said of it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(
            f"{snapshot.repository} is a LoRA adapter, not a model",
            hint=f"to import it as an adapter: kt pull {snapshot.repository}",
        )
        self.snapshot = snapshot


class Watcher:
    """A listener for the progress of a pull; this one ignores everything."""

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """Does nothing; overridden to show that the transfer `what` of `total_bytes` begins, of which `done_bytes` are
        on disk.
        """

    def advance(self, n_bytes: int) -> None:
        """Does nothing; overridden to show that `n_bytes` more have arrived."""

    def end(self) -> None:
        """Does nothing; overridden to show that the transfer has ended."""


def pull(
    reference: Reference,
    watcher: Watcher,
    *,
    snapshot: Snapshot | None = None,
    limit_bps: int | None = None,
    read_of: Callable[[Path, Files], Files] = lambda folder, files: files,
) -> Entry:
    """Downloads a model's repository into the library; returns its library entry, at once if it is already complete.

    Args:
        snapshot: what the hub said of the repository; None: it is asked.
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
        read_of: called if the weights are in several files, with a folder that has `config.json` and the index, and
            with the files; returns those to download.
    Raises:
        UsageError: the reference names no repository, or one with several quants but none of them.
        Busy: another process is pulling it.
        NotFound, HubError, NotEnoughDisk, BadCheckpoint: the download failed.
    """
    if not reference.repository:
        raise UsageError(
            f"{reference.text} names no repository",
            hint="write org/repo, or a short name (kt list --all)",
        )
    folder = places.checkpoint_path(reference.name)
    present = library.find(reference.name, EntryKind.CHECKPOINT)
    if present is not None and not is_begun(reference.name):
        return present
    with smallfiles.lock(places.lock_path(reference.name), f"pulling {reference.shown}"):
        present = library.find(reference.name, EntryKind.CHECKPOINT)
        if present is not None and present.path == folder:
            _clear(folder)  # a pull that was killed at its very end has not
        if present is not None:
            return present
        if snapshot is None:
            client, snapshot = look(reference)
        else:
            client = hub_named(snapshot.hub)
        files, log = _begin(reference, snapshot, folder), _HashLog(folder)
        if sum(file.name.endswith(".safetensors") for file in files) > 1:
            _fetch_index(client, snapshot, files, log)
            files = read_of(folder, files)
        _take_over(client, snapshot, files, log, watcher)
        left, finished = _missing(files, log), log.add
        fetch_files(client, snapshot, left, folder, watcher, finished=finished, limit_bps=limit_bps)
        _record(snapshot, files, log)
    return library.resolve(reference.name, EntryKind.CHECKPOINT)


def _begin(reference: Reference, snapshot: Snapshot, folder: Path) -> Files:
    """Makes the folder of a pull for which there is room, says there what is pulled, and returns its files."""
    files = wanted(snapshot, reference.quant)
    _check_space(reference, files, folder)
    total = sum(file.size_bytes for file in files)
    smallfiles.expect(places.lock_path(reference.name), total)
    smallfiles.make_folder(folder)
    origin = f"@{reference.revision}" if reference.revision else ""
    quant = f":{reference.quant}" if reference.quant else ""
    text = f"{snapshot.hub}:{snapshot.repository}{origin}{quant}"
    smallfiles.write(folder / scan.PULLING, text)
    return files


def _fetch_index(client: Hub, snapshot: Snapshot, files: Files, log: _HashLog) -> None:
    """Fetches the index of weights in several files, and the configuration, where there is an index."""
    if any(file.name == _INDEX for file in files):
        first = [file for file in files if file.name in (_CONFIG, _INDEX)]
        _take_over(client, snapshot, first, log, Watcher())
        rest = _missing(first, log)
        fetch_files(client, snapshot, rest, log.folder, Watcher(), finished=log.add)


def is_begun(name: str) -> bool:
    """Returns whether a download of the model with this library name was started and is not complete."""
    return (places.checkpoint_path(name) / scan.PULLING).is_file()


def wanted(snapshot: Snapshot, quant: str = "") -> tuple[RemoteFile, ...]:
    """Returns the files of a model's repository that kt downloads: safetensors weights, configuration, tokenizer and
    licence; with `quant`, the GGUF files of that quant and the licence.

    Args:
        quant: the name of a set of GGUF files of one precision, such as Q4_K_M.
    Raises:
        HoldsAdapter: the repository is an adapter. BadCheckpoint: it has no model that kt can read.
        UsageError: there are several quants and none is named. NotFound: there is no such quant.
    """
    if quant:
        notices = (file for file in snapshot.files if _NOTICES.fullmatch(file.name))
        return (*quant_named(snapshot, quant).files, *notices)
    files = tuple(
        file
        for file in snapshot.files
        if WANTED.fullmatch(file.name) and len(file.name) <= _LONGEST_NAME
    )
    names = {file.name for file in files}
    if _ADAPTER in names and not any(_is_model_weights(name) for name in names):
        raise HoldsAdapter(snapshot)
    if not any(name.endswith(".safetensors") for name in names):
        if quants := quants_of(snapshot):
            raise choose(snapshot, quants, smallfiles.free_bytes(config.home()))
        others = {Path(file.name).suffix for file in snapshot.files} & {
            ".bin",
            ".pt",
            ".pth",
            ".gguf",
        }
        only = f", only {', '.join(sorted(others))} files" if others else ""
        raise BadCheckpoint(
            f"{snapshot.repository} has no safetensors weights{only}",
            hint="choose a repository that has them"
            + (
                ", or download one .gguf file and name it: kt chat ./FILE.gguf"
                if ".gguf" in others
                else ""
            ),
        )
    if _CONFIG not in names:
        raise BadCheckpoint(
            f"{snapshot.repository} has no config.json, so it is not a model that kt can read"
        )
    return files


def _is_model_weights(name: str) -> bool:
    """Returns whether a file has weights that are not those of an adapter beside them."""
    return name.endswith(".safetensors") and not name.startswith(_OF_ADAPTERS)


def refetch(folder: Path, found: Manifest, names: Collection[str], watcher: Watcher) -> None:
    """Downloads the files `names` of a checkpoint again, as its manifest describes them.

    An existing file stays until the SHA-256 of the new one is verified. The next call resumes an interrupted download.

    Args:
        folder: of the checkpoint.
        found: its manifest.
    Raises:
        UsageError: the manifest does not say where it is from, or has no such file.
        HubError, NotFound: the download failed, or the hub has other files by now.
    """
    known = {record.name: record for record in found.files}
    if not found.hub or not found.repository or not known.keys() >= set(names):
        raise UsageError(f"{folder} does not say where its files come from", hint="pull it again")
    files = tuple(
        RemoteFile(each.name, each.size_bytes, each.sha256)
        for name in names
        if (each := known[name])
    )
    snapshot = Snapshot(found.hub, found.repository, found.revision, files)
    fetch_files(hub_named(found.hub), snapshot, files, folder, watcher)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def fetch_files(
    hub: Hub,
    snapshot: Snapshot,
    files: Collection[RemoteFile],
    folder: Path,
    watcher: Watcher,
    *,
    finished: Callable[[Arrived], None] = lambda arrived: None,
    limit_bps: int | None = None,
) -> None:
    """Downloads files of a repository into a folder, where each gets its name as soon as it is complete and verified.

    Args:
        finished: called for each file that is complete.
        limit_bps: the most bytes per second, 0: no limit; None: the setting `pull-limit`.
    """
    with explained(snapshot.hub, snapshot.repository, snapshot.revision):
        places = [hub.locate(snapshot, file) for file in files]
        title = f"Pulling {snapshot.repository}"
        _transfer(title, places, folder, watcher, finished, limit_bps)


def fetch_beginnings(
    hub: Hub,
    snapshot: Snapshot,
    lengths: Mapping[RemoteFile, int],
    folder: Path,
    watcher: Watcher,
) -> None:
    """Downloads the first `lengths[file]` bytes of each file of a repository into `folder`, under the file's name."""
    with explained(snapshot.hub, snapshot.repository, snapshot.revision):
        places = [
            replace(
                hub.locate(snapshot, file),
                size_bytes=min(n, file.size_bytes),
                of_bytes=file.size_bytes,
                sha256="",
                blob="",
            )
            for file, n in lengths.items()
        ]
        _transfer(f"Reading headers of {snapshot.repository}", places, folder, watcher)


def _transfer(
    title: str,
    places: Sequence[Located],
    folder: Path,
    watcher: Watcher,
    finished: Callable[[Arrived], None] = lambda arrived: None,
    limit_bps: int | None = None,
) -> None:
    """Fetches files from their places, if there are any, with progress."""
    if places:
        limit = config.value("pull-limit") if limit_bps is None else limit_bps
        scratch = folder / SCRATCH
        for place in places:  # a set of GGUF files may lie in a folder
            for root in (folder, scratch):
                (root / place.name).parent.mkdir(parents=True, exist_ok=True)
        transfer = Transfer(places, folder, scratch, finished, limit or None)
        total = sum(place.size_bytes for place in places)
        watcher.begin(title, total, transfer.present_bytes)
        transfer.run(watcher.advance)
        watcher.end()


class _HashLog:
    """The SHA-256 of the files of a pull that have their names, by what changes when a file does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / SCRATCH / _HASHES
        self._path.parent.mkdir(exist_ok=True)
        self._known = self._read()

    def add(self, arrived: Arrived) -> None:
        """Notes a file that got its name."""
        self.note(arrived.located.name, arrived.sha256)

    def note(self, name: str, sha256: str) -> None:
        """Notes the hash of a file in the folder."""
        identity = _identity(self.folder / name)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([*identity, sha256]) + "\n")
        self._known[json.dumps(identity)] = sha256

    def sha256(self, name: str) -> str:
        """The hash of a file; empty: it is not there, or not known."""
        try:
            return self._known.get(json.dumps(_identity(self.folder / name)), "")
        except OSError:
            return ""

    def _read(self) -> dict[str, str]:
        known = {}
        try:
            for line in self._path.read_text(encoding="utf-8").splitlines():
                *identity, sha256 = json.loads(line)
                known[json.dumps(identity)] = str(sha256)
        except (OSError, ValueError):
            return known  # a line that was cut off: what came before it holds
        return known


def _identity(path: Path) -> list[str | int]:
    """Values of a file that change when it does."""
    status = os.stat(path)
    return [path.name, status.st_size, status.st_mtime_ns]


def _missing(files: Iterable[RemoteFile], log: _HashLog) -> list[RemoteFile]:
    """The files that are not in the folder as the hub has them."""
    return [file for file in files if not _is_it(file, log.sha256(file.name))]


def _is_it(file: RemoteFile, sha256: str) -> bool:
    # Where the hub gives no SHA-256, ours was noted after the file's other hash was compared.
    return bool(sha256) and file.sha256.lower() in ("", sha256)


def _take_over(
    hub: Hub, snapshot: Snapshot, files: Collection[RemoteFile], log: _HashLog, watcher: Watcher
) -> None:
    """Uses what the hub's own client has on this machine, and what an older kt left in the folder."""
    found = []
    for file in _missing(files, log):
        if not (file.sha256 or file.blob):
            continue
        path = log.folder / file.name
        there = path if path.is_file() else hub.cached(snapshot, file.name)
        if there is not None and there.stat().st_size == file.size_bytes:
            found.append((file, there))
    if not found:
        return
    watcher.begin("Checking existing files", sum(file.size_bytes for file, _ in found), 0)
    for file, there in found:
        sha256, blob = integrity.digests(there, watcher.advance)
        if file.sha256.lower() in ("", sha256) and file.blob.lower() in ("", blob):
            _share(there, log.folder / file.name)
            log.note(file.name, sha256)
    watcher.end()


def _share(origin: Path, path: Path) -> None:
    """Makes `path` a second name of a file, or a copy where that cannot be."""
    if origin == path:
        return
    path.parent.mkdir(exist_ok=True)  # of what says how an embedding model pools
    path.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(origin), path)
    except OSError:
        beside = path.with_name(f"{path.name}{smallfiles.SUFFIX}")
        shutil.copyfile(origin, beside)
        beside.rename(path)


def _check_space(reference: Reference, files: tuple[RemoteFile, ...], folder: Path) -> None:
    """Refuse before the first byte if the rest does not fit."""
    total = sum(file.size_bytes for file in files)
    need = max(0, total - contents.written_bytes(folder)) + SPARE_BYTES
    smallfiles.require_room(folder, need, f"pulling {reference.shown}", config.home())


def _record(snapshot: Snapshot, files: tuple[RemoteFile, ...], log: _HashLog) -> None:
    """Writes the manifest and removes what only the pull needed."""
    folder = log.folder
    records = []
    for file in files:
        sha256 = log.sha256(file.name)
        if not sha256:
            raise HubError(
                f"{file.name} did not arrive, or has changed since",
                hint="run the same command again; it continues",
            )
        records.append(FileRecord(file.name, (folder / file.name).stat().st_size, sha256))
    found = Manifest(tuple(records), snapshot.hub, snapshot.repository, snapshot.revision)
    smallfiles.write(folder / manifest.CHECKPOINT, found.encode())
    _clear(folder)


def _clear(folder: Path) -> None:
    """Removes what only a pull needed, last the file that says that it has not ended."""
    for left in (SCRATCH, *_OF_CLIENTS):
        path = folder / left
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (folder / scan.PULLING).unlink(missing_ok=True)
