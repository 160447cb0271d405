"""The adapters in the library: each is a folder with the imported files and a manifest of their hashes.

    KT_HOME/adapters/NAME/                  the adapter's files and `kt-adapter.json`
    KT_HOME/adapters/.NAME.importing.PID/   an import that goes on, or was killed: nobody sees it; kt prune removes it
    KT_HOME/adapters/.NAME.pulling/         what a pull has fetched so far

An adapter appears whole, by one rename, or not at all. What its files mean is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ktcli import config, manifest, smallfiles
from ktcli.errors import BadCheckpoint, KtError, NotFound, UsageError
from ktcli.manifest import FileRecord
from ktcli.records import dataclass
from ktcli.store import contents, places
from ktcli.store.archive import Flusher

MANIFEST = "kt-adapter.json"
_VERSION = 1
_MARK = "kt_adapter"
_IMPORTING, _REMOVED, _PULLING = "importing", "removed", "pulling"
_BLOCK = 4 << 20
_WORK = re.compile(rf"\..+\.(?:{_IMPORTING}|{_REMOVED})\.([0-9]{{1,10}})", re.ASCII)
LONGEST_BASE = 4096


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter of the library.

    Attributes:
        base: the name of the base model that it was imported for, as any command takes it.
        records: its files; (): the manifest cannot be read.
        problem: why it cannot be used; else empty.
    """

    name: str
    path: Path
    base: str = ""
    records: tuple[FileRecord, ...] = ()
    problem: str = ""

    @property
    def size_bytes(self) -> int:
        """The total size in bytes of the adapter's files, as its manifest gives it."""
        return sum(record.size_bytes for record in self.records)


def folder() -> Path:
    """Returns the path of the library's folder of LoRA adapters, which need not exist."""
    return config.home() / "adapters"


def require_name(name: str) -> str:
    """Returns `name` unchanged, if it is valid as the name of an adapter.

    Raises:
        UsageError: `name` is not valid.
    """
    if not places.is_name(name):
        raise UsageError(
            f"{name[:120]!r} cannot be the name of an adapter",
            hint="use letters, digits, dots, dashes and underscores, at most "
            f"{places.LONGEST_NAME} of them: --as NAME",
        )
    return name


def require_free(name: str) -> None:
    """Raises UsageError if an adapter in the library has this name, ignoring case.

    Raises:
        UsageError: an adapter has this name.
    """
    if (known := find(name)) is not None:
        raise UsageError(
            f"an adapter {known.name} is already in the library and is not replaced",
            hint=f"use another name (--as NAME), or remove that one: kt adapter rm {known.name}",
        )


def every() -> tuple[AdapterEntry, ...]:
    """Returns all LoRA adapters in the library, in alphabetical order; unusable ones too.

    Raises:
        KtError: the folder cannot be read.
    """
    names = contents.names(folder())
    return tuple(_entry(folder() / name) for name in names if places.is_name(name))


def find(name: str) -> AdapterEntry | None:
    """Returns the library's adapter with this name, ignoring case; None: there is none."""
    if not places.is_name(name):
        return None
    return next((each for each in every() if each.name.lower() == name.lower()), None)


def resolve(name: str) -> AdapterEntry:
    """Returns the library's adapter with this name, in upper or lower case.

    Raises:
        NotFound: there is none. BadCheckpoint: its manifest is damaged.
    """
    found = find(name)
    if found is None:
        near = get_close_matches(name, [each.name for each in every()], 3, 0.5)
        hint = f"did you mean: {', '.join(near)}" if near else "kt adapter list shows them"
        raise NotFound(f"there is no adapter {name[:120]!r} in the library", hint=hint)
    if found.problem:
        raise BadCheckpoint(
            f"{found.name} cannot be used: {found.problem}",
            hint=f"remove it: kt adapter rm {found.name}",
        )
    return found


def _entry(path: Path) -> AdapterEntry:
    try:
        data = smallfiles.read_bounded(path / MANIFEST, manifest.MAX_BYTES)
        base, records = _parsed(data)
    except OSError as error:
        return AdapterEntry(path.name, path, problem=f"{MANIFEST} cannot be read: {error.strerror}")
    except ValueError as error:
        return AdapterEntry(path.name, path, problem=f"{MANIFEST} {error}")
    return AdapterEntry(path.name, path, base, records)


def _parsed(data: bytes) -> tuple[str, tuple[FileRecord, ...]]:
    """The base and files of a manifest.

    Raises:
        ValueError: it is none; the message completes "it …".
    """
    document = smallfiles.json_object(data)
    if document.get(_MARK) != _VERSION:
        raise ValueError(f"has version {str(document.get(_MARK))[:20]}; this kt reads {_VERSION}")
    base, rows = document.get("base"), document.get("files")
    if not isinstance(base, str) or len(base) > LONGEST_BASE or not isinstance(rows, list):
        raise ValueError("lacks a base or a list of files")
    records = tuple(map(manifest.parse_record, rows))
    if any("/" in record.name for record in records):
        raise ValueError("lists a file in another folder")
    return base, records


def _document(base: str, records: Sequence[FileRecord]) -> str:
    found: dict[str, Any] = {
        _MARK: _VERSION,
        "base": base,
        "files": [manifest.encode_record(record) for record in records],
    }
    return json.dumps(found, indent=1) + "\n"


def unchanged(entry: AdapterEntry) -> dict[str, str]:
    """Returns {file name: SHA-256, hexadecimal} of those of an adapter's files that, by their size and change time,
    nobody has touched since the manifest was written.
    """
    try:
        written_ns = (entry.path / MANIFEST).stat().st_ctime_ns
    except OSError:
        return {}
    return {
        each.name: each.sha256 for each in entry.records if _is_as_written(entry, each, written_ns)
    }


def _is_as_written(entry: AdapterEntry, record: FileRecord, written_ns: int) -> bool:
    try:
        status = (entry.path / record.name).stat()
    except OSError:
        return False
    # Not the time of modification, which whoever copies a file over another may set.
    return status.st_size == record.size_bytes and status.st_ctime_ns <= written_ns


# --- importing --------------------------------------------------------------------------------------


@contextmanager
def pulling(name: str) -> Iterator[Path]:
    """Opens a context that reserves the name of an adapter while it is downloaded; yields the path of a hidden folder
    for its files. The folder stays until `pulled` removes it, so that a stopped download can resume.

    Raises:
        UsageError: the name is not valid. Busy: another process downloads it. KtError: the library cannot be written.
    """
    require_name(name)
    path = folder() / f".{name}.{_PULLING}"
    with smallfiles.lock(_pull_lock(name), f"pulling adapter {name}"):
        smallfiles.make_folder(path)
        yield path


def pulled(stage: Path) -> None:
    """Deletes the hidden folder of an adapter's download (see `pulling`), once it has ended."""
    shutil.rmtree(stage, ignore_errors=True)


def _pull_lock(name: str) -> Path:
    return places.lock_path(f"adapter-{name.lower()}.pull")


@contextmanager
def arriving(name: str) -> Iterator[Path]:
    """Opens a context that reserves the name of an adapter while it is imported; yields the path of an empty hidden
    folder for its files, which is deleted at the end unless `complete` has renamed it.

    Raises:
        UsageError: the name is taken or not valid. Busy: another process imports it.
        KtError: the library cannot be written.
    """
    require_name(name)
    with smallfiles.lock(places.lock_path(f"adapter-{name.lower()}"), f"importing adapter {name}"):
        require_free(name)
        stage = folder() / f".{name}.{_IMPORTING}.{os.getpid()}"
        smallfiles.make_folder(folder())
        try:
            shutil.rmtree(stage, ignore_errors=True)  # of a process that had this number
            stage.mkdir()
            yield stage
        except OSError as error:
            raise KtError(
                f"cannot write {error.filename or stage}: {error.strerror}",
                hint="check the permissions and the free space of the library (kt path)",
            ) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def copy(
    source: Path, target: Path, names: Sequence[str], advance: Callable[[int], None]
) -> tuple[FileRecord, ...]:
    """Copies the files `names` from the folder `source` to `target`; returns a record of each: its name, its size, and
    the SHA-256 of the written bytes.

    Args:
        advance: called with the number of bytes of each block that was copied.
    Raises:
        NotEnoughDisk: the files do not fit. OSError: a file cannot be read or written.
    """
    need = sum((source / name).stat().st_size for name in names)
    smallfiles.require_room(target, need, "importing the adapter", target.parent)
    return tuple(_copied(source / name, target / name, advance) for name in names)


def _copied(source: Path, target: Path, advance: Callable[[int], None]) -> FileRecord:
    state, size = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with source.open("rb", buffering=0) as stream:
        descriptor = os.open(target, flags, 0o644)
        try:
            file = Flusher(descriptor)
            while block := stream.read(_BLOCK):
                state.update(block)
                file.put(block)
                size += len(block)
                advance(len(block))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return FileRecord(target.name, size, state.hexdigest())


def complete(stage: Path, name: str, base: str, records: Sequence[FileRecord]) -> AdapterEntry:
    """Writes the manifest into the folder of an adapter's import and renames the folder to the adapter's name; returns
    the new entry of the library.

    Args:
        base: the name of the base model.
        records: the adapter's files.
    Raises:
        OSError: the manifest or the folder cannot be written.
    """
    smallfiles.write(stage / MANIFEST, _document(base, records))
    smallfiles.sync_folder(stage)
    path = folder() / name
    stage.rename(path)
    smallfiles.sync_folder(folder())
    return _entry(path)


def leftovers() -> tuple[Path, ...]:
    """Returns the paths of the hidden folders left by killed imports and removals of adapters, and by interrupted
    downloads.
    """
    try:
        names = sorted(os.listdir(folder()))
    except OSError:
        return ()
    return tuple(folder() / name for name in names if _is_left(name))


def _is_left(name: str) -> bool:
    """Returns whether a folder is of work that nobody does any more."""
    if match := _WORK.fullmatch(name):
        return not smallfiles.is_running(match[1])
    begun = name.startswith(".") and name.endswith(f".{_PULLING}")
    return begun and smallfiles.holder(_pull_lock(name[1:].removesuffix(f".{_PULLING}"))) is None


def remove(entry: AdapterEntry) -> int:
    """Deletes an adapter from the library; returns the number of bytes freed.

    Raises:
        Busy: another process works on it. KtError: the system refuses.
    """
    lock = places.lock_path(f"adapter-{entry.name.lower()}")
    with (
        smallfiles.lock(lock, f"removing adapter {entry.name}", frees=True),
        contents.removing(entry.path, f"check the permissions of {folder()}"),
    ):
        freed = sum(status.st_size for _, status in contents.walk(entry.path))
        contents.discard(entry.path)
    return freed
