"""Writes bundles to a file, which an interrupted run continues, or to a pipe. Every byte is hashed on its way.

A file is written beside its name, as FILE.part, and each member is flushed before the next begins. So whatever is
followed by another member was written and proved, and a later run goes on behind it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path

from ktcli import manifest, smallfiles
from ktcli.errors import BadCheckpoint, BadPack, KtError, NotFound, UsageError
from ktcli.manifest import FileRecord
from ktcli.records import dataclass
from ktcli.store import heat
from ktcli.store.archive import Flusher, padding
from ktcli.store.bundle import (
    LIST,
    MOST_HEAT_BYTES,
    Bundle,
    BundlePart,
    head,
    is_name,
    parse,
    refuse_name,
)
from ktcli.store.download import Watcher
from ktcli.store.entry import Entry

_BLOCK = 4 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)  # of an archive
SUFFIX = ".part"


@dataclass(frozen=True, slots=True)
class Export:
    """A bundle and the places of its bytes.

    Attributes:
        label: what is exported, for people.
        folders: the folder of each part.
        heat: the bytes of the heat map; empty: there is none.
    """

    label: str
    bundle: Bundle
    folders: tuple[Path, ...]
    heat: bytes = field(default=b"", repr=False)

    @property
    def total_bytes(self) -> int:
        """The size in bytes of the whole tar archive."""
        return sum(_room(each) for each in self.pieces()) + len(_END)

    def pieces(self) -> Iterator[FileRecord]:
        """Yields the records (name, size, SHA-256) of the archive's members in their order, kt-bundle.json first."""
        text = self.bundle.encode()
        yield FileRecord(LIST, len(text), hashlib.sha256(text).hexdigest())
        yield from self.bundle.members()

    def source(self, member: FileRecord) -> Path | bytes:
        """Returns the path of the file that a member of the archive is copied from, or the bytes of kt-bundle.json or
        of the heat map.
        """
        if member.name == LIST:
            return self.bundle.encode()
        for part, folder in zip(self.bundle.parts, self.folders, strict=True):
            inside = f"{part.folder(self.bundle.name)}/"
            if member.name.startswith(inside):
                return folder / member.name.removeprefix(inside)
        return self.heat


def gather(entries: Sequence[Entry]) -> Export:
    """Returns what is to be exported of complete library entries of one model: the bundle, the entries' folders and the
    heat map (how often each expert was chosen). Only the manifests of the entries are read.

    Raises:
        NotFound: an entry has no manifest. BadCheckpoint: a manifest is damaged.
        UsageError: the model's name is not valid in a library.
    """
    names = {entry.name.partition("@")[0] for entry in entries}  # "@" in a folder of one's own
    name = min(names)
    if len(names) > 1 or not is_name(name):
        raise UsageError(
            f"{name[:100]!r} is not a valid model name in a library",
            hint="rename the folder, using letters, digits, dots, dashes and underscores",
        )
    data = b""
    with contextlib.suppress(OSError):  # advice, which nobody needs
        data = smallfiles.read_bounded(heat.path_of(name), MOST_HEAT_BYTES)
    record = FileRecord(f"{name}.json", len(data), hashlib.sha256(data).hexdigest())
    parts = tuple(map(_part, entries))
    label = entries[0].label if len(entries) == 1 else name
    return Export(
        label, Bundle(name, parts, record if data else None), tuple(e.path for e in entries), data
    )


def _part(entry: Entry) -> BundlePart:
    path = entry.path / entry.kind.manifest
    found = manifest.read(path)
    if found is None:
        raise NotFound(
            f"no hashes are recorded for {entry.label}",
            hint=f"kt pull and kt convert record them; convert it: kt convert {entry.label}",
        )
    try:
        data = smallfiles.read_bounded(path, manifest.MAX_BYTES)
        for record in found.records:
            refuse_name(record.name)
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} {error}") from None
    own = FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())
    return BundlePart(found.formats_label, (own, *found.records))


# --- writing ----------------------------------------------------------------------------------------


def write_stream(what: Export, descriptor: int, watcher: Watcher) -> None:
    """Writes the tar archive of an export into a pipe, given by its descriptor.

    Raises:
        KtError: a file cannot be read or has a checksum mismatch. OSError: the pipe refuses.
    """
    watcher.begin(f"Exporting {what.label}", what.total_bytes, 0)
    file = Flusher(descriptor)
    for member in what.pieces():
        _write(what, member, file, watcher)
    file.put(_END)
    watcher.advance(len(_END))


def write_file(what: Export, target: Path, watcher: Watcher) -> None:
    """Writes the tar archive of an export to FILE.part, continuing where an earlier run stopped, and renames it to
    `target` (FILE) once it is complete.

    Raises:
        UsageError: FILE exists, or FILE.part is of another export.
        Busy: another process writes the archive.
        NotEnoughDisk: the disk has less room than is still to be written.
        KtError: a file cannot be read, or has a checksum mismatch; the archive cannot be written.
    """
    beside = target.with_name(target.name + SUFFIX)
    with smallfiles.lock(target.with_name(f".{target.name}.lock"), f"exporting {what.label}"):
        if os.path.lexists(target):
            raise UsageError(
                f"{target} already exists", hint="choose another file name, or remove that one"
            )
        try:
            what, begun = _begun(what, beside)
            need = what.total_bytes - begun
            smallfiles.require_room(target.parent, need, f"exporting {what.label}")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(beside, flags, 0o644)
            try:
                watcher.begin(f"Exporting {what.label}", what.total_bytes, begun)
                _fill(what, descriptor, begun, watcher)
            finally:
                os.close(descriptor)
            os.rename(beside, target)
            smallfiles.sync_folder(target.parent)
        except OSError as error:
            raise _refused(error, beside) from error


def _begun(what: Export, beside: Path) -> tuple[Export, int]:
    """The export with the heat map that an earlier run wrote, and the bytes of that run that are proved.

    Raises:
        UsageError: what is there is of another run.
    """
    try:
        status = beside.lstat()
    except FileNotFoundError:
        return what, 0
    before = None
    if stat.S_ISREG(status.st_mode):
        before = _earlier(
            what, smallfiles.read_start(beside, manifest.MAX_BYTES + 2 * MOST_HEAT_BYTES)
        )
    if before is None:
        raise UsageError(
            f"{beside} exists and does not belong to this export",
            hint="choose another file name, or remove that one",
        )
    begun = 0
    for member in before.pieces():
        if status.st_size <= begun + _room(member):
            break
        begun += _room(member)
    return before, begun


def _earlier(what: Export, start: bytes) -> Export | None:
    """The export whose archive begins with these bytes; None: it is of something else."""
    whole = head(LIST, len(what.bundle.encode())) + what.bundle.encode()
    if whole.startswith(start):  # it stopped in the list
        return what
    try:
        size = tarfile.TarInfo.frombuf(start[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape").size
        at = len(head(LIST, size))
        found = parse(start[at : at + size])
    except (tarfile.TarError, ValueError):
        return None
    if found.identity != what.bundle.identity:
        return None
    if found.heat is None:
        return replace(what, bundle=found, heat=b"")
    at += size + padding(size) + len(head(f"heat/{found.name}.json", found.heat.size_bytes))
    data = start[at : at + found.heat.size_bytes]
    if hashlib.sha256(data).hexdigest() == found.heat.sha256:
        return replace(what, bundle=found, heat=data)
    return what  # it stopped in the heat map, and all that it wrote is written again


def _fill(what: Export, descriptor: int, begun: int, watcher: Watcher) -> None:
    os.ftruncate(descriptor, begun)
    os.lseek(descriptor, begun, os.SEEK_SET)
    file, at = Flusher(descriptor), 0
    for member in what.pieces():
        if at >= begun:
            _write(what, member, file, watcher)
            os.fsync(descriptor)
        at += _room(member)
    file.put(_END)
    watcher.advance(len(_END))
    os.fsync(descriptor)


def _write(what: Export, member: FileRecord, file: Flusher, watcher: Watcher) -> None:
    """Writes one member; its padding only when its bytes are proved."""
    file.put(head(member.name, member.size_bytes))
    source = what.source(member)
    if isinstance(source, bytes):
        file.put(source)
        watcher.advance(len(source))
    else:
        _copy(what, source, member, file, watcher)
    file.put(bytes(padding(member.size_bytes)))
    watcher.advance(_room(member) - member.size_bytes)


def _copy(what: Export, source: Path, member: FileRecord, file: Flusher, watcher: Watcher) -> None:
    state, left = hashlib.sha256(), member.size_bytes
    problem = "has a checksum mismatch"
    try:
        stream = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadPack(f"cannot read {source}: {error.strerror}", hint=_repair(what)) from error
    try:
        while left:
            try:
                block = os.read(stream, min(left, _BLOCK))
            except OSError as error:
                raise BadPack(f"cannot read {source}: {error.strerror}") from error
            if not block:
                problem = "is shorter than its manifest says"
                break
            state.update(block)
            file.put(block)
            watcher.advance(len(block))
            left -= len(block)
    finally:
        os.close(stream)
    if left or state.hexdigest() != member.sha256:
        raise BadPack(f"{source} {problem}, so it is not exported", hint=_repair(what))


def _repair(what: Export) -> str:
    return f"kt verify --repair {what.label}"


def _room(member: FileRecord) -> int:
    """The bytes that a member takes in an archive."""
    return (
        len(head(member.name, member.size_bytes)) + member.size_bytes + padding(member.size_bytes)
    )


def _refused(error: OSError, beside: Path) -> KtError:
    hints = {
        errno.EFBIG: "FAT disks cannot hold files of 4 GiB; format it as exFAT or ext4, or use another one",
        errno.ENOSPC: "free some space there; the same command continues where it stopped",
        errno.EDQUOT: "free some space there; the same command continues where it stopped",
    }
    what = f"cannot write {beside}: {error.strerror or error}"
    return KtError(what, hint=hints.get(error.errno or 0, "choose a writable folder"))
