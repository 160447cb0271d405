"""Reads bundles into the library, as hostile input: from a file or a pipe, each file checked before it gets its name.

The list ahead says what must follow, so an archive has no say in where anything goes: a member that is not the next
one of the list, or no plain file of that size, ends the reading. A part is *partial* (see `library`) until all of the
bundle is there; a later run skips its files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ktcli import manifest, smallfiles
from ktcli.errors import BadCheckpoint, KtError, UsageError
from ktcli.manifest import FileRecord
from ktcli.records import dataclass
from ktcli.store import heat, places, scan
from ktcli.store.archive import Archive, Flusher, padding
from ktcli.store.bundle import LIST, SCRATCH, Bundle, BundlePart, parse
from ktcli.store.download import Watcher
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind

_BLOCK = 4 << 20
_MARKS = "kt-import."  # begins what an import keeps in a folder beside the files


def read_list(archive: Archive) -> Bundle:
    """Reads kt-bundle.json, the list of files at the beginning of a bundle's archive; returns the bundle that it
    describes.

    Raises:
        BadCheckpoint: the archive is no bundle, or a damaged one.
    """
    if (first := archive.header()) is None and archive.is_empty:
        raise BadCheckpoint(
            f"{archive.name} is empty", hint="kt export MODEL FILE.tar writes a bundle"
        )
    if first is None or first.name != LIST:
        raise archive.bad(f"is not a bundle: it does not begin with {LIST}")
    if first.size > manifest.MAX_BYTES:
        raise archive.bad(f"has a {LIST} that is too large")
    data = archive.exactly(first.size)
    archive.skip(padding(first.size))
    try:
        return parse(data)
    except ValueError as error:
        raise BadCheckpoint(
            f"{archive.name} is not a bundle that kt can read: it {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A part of a bundle that is being imported into the library.

    Attributes:
        folder: where it will lie.
        known: whether it already exists, the same in every byte that its manifest vouches for.
    """

    part: BundlePart
    folder: Path
    known: bool

    @property
    def mark(self) -> Path:
        """The path of the file in the part's folder that records an interrupted import."""
        return self.folder / scan.IMPORTING

    def has(self, file: FileRecord) -> bool:
        """Returns whether a file of the part is in the library already: the part is complete, or its folder has a file
        of this name and size, which gets the name only once it is verified.
        """
        if self.known:
            return True
        try:
            status = (self.folder / file.name).lstat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == file.size_bytes

    def leftovers(self) -> set[str]:
        """Returns the names of the files in the part's folder that exist only during an import, including those left by
        killed imports.
        """
        own = f"{self.part.kind.manifest}."
        return {
            name
            for name in os.listdir(self.folder)
            if name.startswith(_MARKS)
            or (name.startswith(own) and name.endswith(smallfiles.SUFFIX))
        }

    def tidy(self) -> None:
        """Deletes the files in the part's folder that exist only during an import, if the part is complete or none of
        its files arrived; in the latter case, the folder too.
        """
        there, own = set(os.listdir(self.folder)), self.leftovers()
        if self.part.kind.manifest in there or there == own:
            for name in own:
                (self.folder / name).unlink(missing_ok=True)
        if there == own:
            self.folder.rmdir()

    @property
    def missing_bytes(self) -> int:
        """The number of bytes of the part's files that are not in the library yet."""
        return sum(file.size_bytes for file in self.part.files if not self.has(file))


def receive(
    archive: Archive, bundle: Bundle, name: str, arguments: Sequence[str], watcher: Watcher
) -> list[Entry]:
    """Writes the parts of a bundle (a checkpoint, conversions) into the library; returns their entries in the order of
    the parts, including those that were there already.

    Args:
        archive: read up to the end of kt-bundle.json, which describes `bundle`.
        name: what the model is to be called.
        arguments: those of the `kt import` command that resumes an interrupted import.
    Raises:
        UsageError: a different model of that name is in the library.
        Busy: another process works on the model.
        NotEnoughDisk: the disk has less room than the missing files need.
        BadCheckpoint: the archive is damaged, cut off, or differs from its list.
        KtError: the library cannot be written.
    """
    home = places.folder_of(EntryKind.PACK).parent
    try:
        with smallfiles.lock(places.lock_path(name), f"importing {name}"):
            arrivals = [_arrival(part, name, bundle.identity) for part in bundle.parts]
            need = sum(each.missing_bytes for each in arrivals)
            smallfiles.require_room(home, need, f"importing {name}")
            watcher.begin(f"Importing {name}", bundle.size_bytes, bundle.size_bytes - need)
            mark = {"bundle": bundle.identity, "arguments": list(arguments)}
            with ExitStack() as held:
                for each in arrivals:
                    _hold(each, name, json.dumps(mark), held)
                _unpack(archive, bundle, arrivals, heat.path_of(name), watcher)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise KtError(
            f"cannot write {error.filename or home}: {error.strerror or error}",
            hint="free some space; the same command continues where it stopped"
            if full
            else "check the permissions of the library folder (kt path)",
        ) from error
    return [scan.entry_at(each.folder, each.part.kind) for each in arrivals]


def _arrival(part: BundlePart, name: str, identity: str) -> Arrival:
    """Where a part goes.

    Raises:
        UsageError: something else is there.
    """
    experts, _, dense = part.formats.partition("-")
    if part.kind is EntryKind.PACK:
        folder = places.pack_path(name, experts, dense)
    else:
        folder = places.checkpoint_path(name)
    arrival = Arrival(part, folder, known=False)
    if not os.path.lexists(folder):
        return arrival
    entry, own = scan.entry_at(folder, part.kind), part.files[0]
    try:
        data = smallfiles.read_bounded(folder / own.name, manifest.MAX_BYTES)
    except FileNotFoundError:
        begun = set(os.listdir(folder)) - arrival.leftovers() - {manifest.LOCK}
        if _identity(arrival.mark) == identity or not begun:
            return arrival
        raise UsageError(
            f"{entry.label} is in the library, but incomplete: {entry.problem}",
            hint=f"complete it ({entry.again}), remove it (kt rm {entry.label}), or import with --as NAME",
        ) from None
    if hashlib.sha256(data).hexdigest() != own.sha256:
        raise UsageError(
            f"a different {entry.label} is already in the library and is not replaced",
            hint=f"import with --as NAME, or remove that one: kt rm {entry.label}",
        )
    return replace(arrival, known=True)


def _identity(mark: Path) -> str:
    """The identity of the bundle whose import was interrupted; empty: nobody knows."""
    return str(smallfiles.known_object(mark, scan.MAX_REFERENCE_BYTES).get("bundle", ""))


def _hold(arrival: Arrival, name: str, mark: str, held: ExitStack) -> None:
    """Makes the folder of what arrives, with the mark of whose it is, and holds it; if nothing arrives, it goes."""
    smallfiles.make_folder(arrival.folder)
    held.callback(arrival.tidy)
    lock = places.lock_path(name)
    if arrival.part.kind is EntryKind.PACK:
        lock = arrival.folder / manifest.LOCK
        held.enter_context(smallfiles.lock(lock, f"importing {name}"))
    smallfiles.expect(lock, sum(file.size_bytes for file in arrival.part.files))
    if not (arrival.known or arrival.mark.exists()):
        smallfiles.write(arrival.mark, mark)


def _unpack(
    archive: Archive, bundle: Bundle, arrivals: Sequence[Arrival], counts: Path, watcher: Watcher
) -> None:
    """Reads the whole archive; completes what arrived when nothing is left to be proved."""
    members, chosen, manifests = bundle.members(), b"", []
    if bundle.heat is not None:
        chosen = _small(archive, next(members))
    for each in arrivals:
        manifests.append(_small(archive, next(members)))
        try:
            each.part.refuse_other(manifests[-1])
        except ValueError as error:
            what = f"{each.part.files[0].name} in {archive.name} is damaged: it {error}"
            raise BadCheckpoint(what) from None
        watcher.advance(0 if each.known else len(manifests[-1]))
        for file in each.part.files[1:]:
            member = next(members)
            _expect(archive, member)
            if each.has(file):
                archive.skip(member.size_bytes)
            else:
                _extract(archive, member, each.folder / file.name, each.folder / SCRATCH, watcher)
            archive.skip(padding(member.size_bytes))
    if (extra := archive.header()) is not None:
        raise archive.bad(f"contains {extra.name[:60]!r}, which is not in its list,")
    for each, data in zip(arrivals, manifests, strict=True):
        if not each.known:
            smallfiles.write(each.folder / each.part.kind.manifest, data)
    if chosen and not os.path.lexists(counts):
        smallfiles.make_folder(counts.parent)
        smallfiles.write(counts, chosen)


def _expect(archive: Archive, member: FileRecord) -> None:
    """Reads the header of a member, which must be the next one.

    Raises:
        BadCheckpoint: it is another one.
    """
    found = archive.header()
    if found is None:
        raise archive.cut()
    if found.name != member.name:
        raise archive.bad(f"holds {found.name[:60]!r} where {member.name[:60]!r} belongs,")
    if found.size != member.size_bytes:
        what = (
            f"gives {member.name[:60]!r} {found.size} bytes, but its list says {member.size_bytes},"
        )
        raise archive.bad(what)


def _small(archive: Archive, member: FileRecord) -> bytes:
    """The bytes of a member whose size the list bounds."""
    _expect(archive, member)
    data = archive.exactly(member.size_bytes)
    archive.skip(padding(member.size_bytes))
    if hashlib.sha256(data).hexdigest() != member.sha256:
        raise archive.bad(f"is damaged: {member.name[:60]!r} has a checksum mismatch")
    return data


def _extract(
    archive: Archive, member: FileRecord, target: Path, beside: Path, watcher: Watcher
) -> None:
    """Writes the bytes of a member beside its name, proves them, and gives them the name."""
    state, left = hashlib.sha256(), member.size_bytes
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(beside, flags, 0o644)
    try:
        file = Flusher(descriptor)
        while left:
            block = archive.exactly(min(left, _BLOCK))
            state.update(block)
            file.put(block)
            watcher.advance(len(block))
            left -= len(block)
        if state.hexdigest() != member.sha256:
            raise archive.bad(f"is damaged: {member.name[:60]!r} has a checksum mismatch")
        os.fsync(descriptor)
        os.rename(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
