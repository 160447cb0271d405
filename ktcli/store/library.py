"""The library on disk: checkpoints as they were pulled, and packs made from them.

    KT_HOME/checkpoints/NAME/                     a repository's files and `kt-source.json`
    KT_HOME/packs/NAME@EXPERTS-DENSE/             a conversion and its `kt.json`
    KT_HOME/heat/NAME.json                        which experts of the model were chosen (see `heat`)
    KT_HOME/origins/NAME                          where a model outside the library lies (see `origins`)
    KT_HOME/used/NAME@EXPERTS-DENSE               its time is when the conversion was last used (see `usage`)

A folder whose manifest is missing is *partial*: its work is going on, or was interrupted and can be
continued. Nothing else is state.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from shlex import quote

from ktcli import config, manifest, smallfiles
from ktcli.errors import BadCheckpoint, BadPack, Busy, KtError, NotFound, UsageError
from ktcli.numbered import numbered_set
from ktcli.smallfiles import Holder
from ktcli.store import catalog, origins
from ktcli.store.reference import GGUF, Reference, is_short, parse, repository_named

BUILTIN = "kt-mini"
LOCAL = "local--"  # begins the names of what belongs to folders outside the library
INTERRUPTED = "interrupted"
MAX_REFERENCE_BYTES = 4096
_SECTOR = 512  # bytes, in which st_blocks counts
PULLING = "kt-pull.part"  # in a checkpoint's folder while it is pulled: the reference to pull again


class EntryKind(Enum):
    """The kinds of entry: a checkpoint is a repository's own files, or a GGUF file; a pack is ours, ready to run."""

    CHECKPOINT = "checkpoint"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model on disk.

    Attributes:
        name: short name, library name, or the folder's own name.
        path: the folder; for a GGUF model the file, or any one of a numbered set.
        problem: why it cannot be used: "interrupted", the process that works on it, or what is wrong
            with its manifest; else empty.
        formats: "<experts>-<dense>" for a pack; empty for a checkpoint.
        source: where it came from, "hf:org/repo@revision" or a path; empty if nobody recorded it.
        managed: whether it lies in the library folder, so that `kt rm` may remove it.
        work: the process that works on it at this moment; None: none does.
        spoken: for a pack of a folder outside the library, the name of that folder, where it means no other
            model; else empty.
    """

    name: str
    kind: EntryKind
    path: Path
    problem: str = ""
    formats: str = ""
    source: str = ""
    managed: bool = True
    work: Holder | None = None
    spoken: str = ""

    @property
    def complete(self) -> bool:
        return not self.problem

    @property
    def running(self) -> bool:
        """Whether it is not complete and a process works on it."""
        return self.work is not None and not self.complete

    @property
    def done(self) -> float | None:
        """The share of its bytes that the process working on it has written so far; None: unknown."""
        if not self.running or self.work is None or not self.work.total_bytes:
            return None
        return min(1.0, written_bytes(self.path) / self.work.total_bytes)

    @property
    def label(self) -> str:
        """The name that finds exactly this entry again."""
        if not self.managed:
            return self.name if self.name == BUILTIN else str(self.path)
        name = self.spoken or self.name
        return f"{name}@{self.formats}" if self.formats else name

    @property
    def again(self) -> str:
        """The command that continues or repeats the work this entry came from, or words for it."""
        if self.kind is EntryKind.PACK:
            if self.name.startswith(LOCAL):
                origin = origins.origin_of(self.name) or "FOLDER"
                return f"kt convert {quote(str(origin))}@{self.formats}"
            return f"kt convert {self.name if _is_recommended(self) else self.label}"
        # The shortest reference that means this entry: a recorded commit is not part of most names.
        read_back = repository_named(self.name)
        for text in (self.name, self.source.rpartition("@")[0], self.source, read_back):
            try:
                reference = parse(text)
            except UsageError:
                continue
            if reference.repository and reference.name == self.name:
                return f"kt pull {text}"
        return f"kt pull {self.source or self.name}"

    @property
    def repair(self) -> str:
        """The commands that make a damaged entry again, or words for them."""
        if self.managed:
            return f"kt rm {self.label} && {self.again}"
        if self.kind is EntryKind.PACK:
            return (
                f"rm -r {quote(str(self.path))} && kt convert MODEL --out {quote(str(self.path))}"
            )
        return f"copy its files to {self.path} once more"

    @property
    def size_bytes(self) -> int:
        """The bytes of its files; files behind links are not counted."""
        if self.path.suffix.lower() == GGUF:
            return sum(part.stat().st_size for part in parts(self.path))
        return _bytes_below(self.path)


def checkpoint_path(name: str) -> Path:
    """The folder where the checkpoint of a library name lies or will lie."""
    return config.home() / "checkpoints" / _one_folder(name)


def pack_path(name: str, experts: str, dense: str) -> Path:
    """The folder where a conversion lies or will lie."""
    return config.home() / "packs" / _one_folder(f"{_one_folder(name)}@{experts}-{dense}")


def lock_path(name: str) -> Path:
    """The lock that whoever changes a model's files holds."""
    return config.home() / "locks" / f"{_one_folder(name)}.lock"


def local_name(folder: Path, mark: str) -> str:
    """A name in the library for what belongs to a folder outside it.

    Args:
        mark: a text that goes into the name's hash beside the folder's path.
    """
    identity = f"{folder.resolve()} {mark}".encode("utf-8", "replace")
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in folder.name)
    return f"{LOCAL}{stem.strip('.')[:100] or 'model'}--{sha256(identity).hexdigest()[:8]}"


def conversion_name(pack: Path) -> str:
    """The name that tells a conversion from all others, whether it is in the library or not."""
    inside = pack.parent.resolve() == folder_of(EntryKind.PACK).resolve()
    return pack.name if inside else local_name(pack, "pack")


def identity(pack: Path) -> str:
    """The identity of a conversion: equal ones have the same weights in the same formats; empty if it has no
    manifest."""
    try:
        data = smallfiles.read_bounded(pack / manifest.PACK, manifest.MAX_BYTES)
    except OSError:
        return ""
    return sha256(data).hexdigest()[:32]


def model_name(pack: Path) -> str:
    """The name that all conversions of one model in the library share; a pack outside it has its own."""
    return conversion_name(pack).partition("@")[0]


def entries() -> tuple[Entry, ...]:
    """Everything in the library and the built-in model, by name; partial ones too."""
    found = [*_scan(EntryKind.CHECKPOINT), *_scan(EntryKind.PACK)]
    builtin = _builtin()
    if builtin is not None:
        found.append(builtin)
    found = _spoken(found)
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.kind.value, entry.formats)))


def _spoken(found: list[Entry]) -> list[Entry]:
    """The entries, where those of folders outside the library are called as these, unless somebody else is."""
    stems = {
        e.name: e.name.removeprefix(LOCAL).rpartition("--")[0]
        for e in found
        if e.name.startswith(LOCAL)
    }
    taken = [
        *stems.values(),
        *({each.name.lower() for each in found} - stems.keys()),
        *catalog.names(),
    ]
    often = Counter(name.lower() for name in taken)
    clear = {
        name: stem for name, stem in stems.items() if is_short(stem) and often[stem.lower()] == 1
    }
    return [
        replace(each, spoken=clear[each.name]) if each.name in clear else each for each in found
    ]


def matching(name: str) -> tuple[Entry, ...]:
    """All entries that `name` can mean: packs first, led by the one in the formats that the catalogue recommends;
    for a local folder or file the entry itself, then the packs that were ever made from it.

    Raises:
        UsageError: not a name. NotFound: a local folder that is not there or holds no model.
    """
    reference = parse(name)
    if reference.folder is not None:
        return (_local(reference.folder), *_made_from(reference.folder, reference.formats))
    found = [entry for entry in entries() if _means(reference, entry)]
    return tuple(
        sorted(
            found,
            key=lambda entry: (
                entry.kind is EntryKind.CHECKPOINT,
                not entry.complete,
                not _is_recommended(entry),
            ),
        )
    )


def _is_recommended(entry: Entry) -> bool:
    """Returns whether an entry has the formats that a conversion gets when nobody asks for others."""
    profile = catalog.find(entry.name)
    return profile is not None and entry.formats == f"{profile.experts}-{profile.dense}"


def find(name: str, kind: EntryKind | None = None) -> Entry | None:
    """The complete entry that `name` means; packs before checkpoints; None if there is none.

    A local folder or file means itself, whichever formats are asked for: packs may have been made from it
    before its files were changed.
    """
    usable = [e for e in matching(name) if e.complete and (kind is None or e.kind is kind)]
    return usable[0] if usable else None


def resolve(name: str, kind: EntryKind | None = None) -> Entry:
    """The complete entry that `name` means; packs before checkpoints.

    Args:
        kind: the only kind that will do; None: either.
    Raises:
        UsageError: not a name.
        NotFound: nothing usable on disk; the hint is the command that changes it.
    """
    entry = find(name, kind)
    if entry is not None:
        return entry
    reference, broken = parse(name), [entry for entry in matching(name) if not entry.complete]
    if broken:
        raise incomplete(broken[0])
    if kind is EntryKind.CHECKPOINT and find(name) is not None:
        raise NotFound(
            f"{name} is a conversion, not a checkpoint",
            hint="name the model or the folder that it was made from",
        )
    if kind is EntryKind.PACK and find(name) is not None:
        raise NotFound(f"{name} is not converted", hint=f"convert it with: kt convert {name}")
    if reference.repository:
        raise NotFound(f"{name} is not in the library", hint=f"get it with: kt pull {name}")
    profile = catalog.find(reference.name)
    if profile is not None and profile.builtin:
        catalog.builtin_path(f"{profile.builtin}/config.json")
    raise catalog.unknown(name, tuple(entry.name for entry in entries()))


def incomplete(entry: Entry) -> KtError:
    """The error that an entry is not complete: who works on it, or the command that goes on with it."""
    what = f"{entry.label} is not complete: {entry.problem}"
    if entry.running:
        return Busy(what, hint="wait until it ends, or stop it; nothing it finished is lost")
    return NotFound(what, hint=f"continue with: {entry.again}")


@contextmanager
def repairable(pack: Path) -> Iterator[None]:
    """Gives errors about a damaged pack the command that makes it again; its checkpoint stays."""
    try:
        yield
    except BadPack as error:
        inside = pack.absolute().parent == folder_of(EntryKind.PACK)
        entry = (
            _entry(pack, EntryKind.PACK)
            if inside
            else Entry(pack.name, EntryKind.PACK, pack, managed=False)
        )
        error.hint = error.hint or f"make it again with: {entry.repair}"
        raise


def parts(file: Path) -> list[Path]:
    """The files of the numbered set that a GGUF file belongs to, as far as they are there."""
    try:
        there = set(os.listdir(file.parent))  # a name may claim a set of 99,999 files
    except OSError:
        return []
    return [
        path
        for name in numbered_set(file.name)
        if name in there and (path := file.parent / name).is_file()
    ]


def walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields every regular file below `folder`; links are neither followed nor returned."""
    try:
        items = sorted(os.scandir(folder), key=lambda item: item.name)
    except OSError:
        return
    for item in items:
        if item.is_dir(follow_symlinks=False):
            yield from walk(Path(item.path))
        elif item.is_file(follow_symlinks=False):
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
            yield Path(item.path), status


def written_bytes(folder: Path) -> int:
    """The bytes that the files of a folder take; those of a partial file have gaps between them."""
    return sum(min(each.st_size, _SECTOR * each.st_blocks) for _, each in walk(folder))


def _bytes_below(folder: str | Path) -> int:
    """The bytes of every regular file below a folder, as `walk` finds them, without a path for each of thousands."""
    total = 0
    try:
        with os.scandir(folder) as items:
            for item in items:
                if item.is_file(follow_symlinks=False):
                    total += item.stat(follow_symlinks=False).st_size
                elif item.is_dir(follow_symlinks=False):
                    total += _bytes_below(item.path)
    except OSError:  # renamed or removed meanwhile
        return total
    return total


def folder_of(kind: EntryKind) -> Path:
    """The folder that entries of this kind lie in."""
    return config.home() / f"{kind.value}s"


def _one_folder(name: str) -> str:
    """Returns `name`, refused if it could be anything but the name of one folder."""
    if not name or name.startswith(".") or "/" in name or "\0" in name or len(name) > 250:
        raise UsageError(f"{name!r} cannot be the name of a model in the library")
    return name


def _scan(kind: EntryKind) -> Iterator[Entry]:
    folder = folder_of(kind)
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
            yield _entry(Path(item.path), kind)


def _entry(path: Path, kind: EntryKind) -> Entry:
    name, _, formats = path.name.partition("@")
    try:
        source = manifest.read(path / _manifest_name(kind))
    except BadCheckpoint as error:
        return Entry(name, kind, path, str(error), formats)
    if kind is EntryKind.PACK and name.startswith(LOCAL):
        origin = str(origins.origin_of(name) or "")
    else:
        origin = _pulling(path / PULLING) if source is None else source.origin
    held = smallfiles.holder(path / manifest.LOCK if kind is EntryKind.PACK else lock_path(name))
    if source is not None:
        return Entry(name, kind, path, "", formats, origin or source.origin, work=held)
    problem = f"process {held.process} is {held.doing}" if held else INTERRUPTED
    return Entry(name, kind, path, problem, formats, origin, work=held)


def _pulling(path: Path) -> str:
    """The reference that an interrupted pull left; empty if it left none."""
    try:
        data = smallfiles.read_bounded(path, MAX_REFERENCE_BYTES)
        return data.decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _manifest_name(kind: EntryKind) -> str:
    return manifest.PACK if kind is EntryKind.PACK else manifest.CHECKPOINT


def _builtin() -> Entry | None:
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


def _local(folder: Path) -> Entry:
    """The entry of a folder or GGUF file that somebody named, in the library or not."""
    try:
        mode = folder.stat().st_mode
        if stat.S_ISREG(mode) and folder.suffix.lower() == GGUF:
            return Entry(folder.name, EntryKind.CHECKPOINT, folder, managed=False)
        if not stat.S_ISDIR(mode):
            raise NotFound(
                f"{folder} is not a folder",
                hint="name the folder that holds config.json or kt.json, or a .gguf file",
            )
        pack, checkpoint = (folder / manifest.PACK).is_file(), (folder / "config.json").is_file()
    except OSError as error:
        raise NotFound(f"cannot read {folder}: {error.strerror}") from error
    if not pack and not checkpoint:
        files = sorted(folder.glob(f"*{GGUF}"))
        hint = (
            f"name the file: {files[0]}"
            if files
            else "a model's folder holds config.json or kt.json"
        )
        raise NotFound(f"there is no model in {folder}", hint=hint)
    kind = EntryKind.PACK if pack else EntryKind.CHECKPOINT
    source = manifest.read(folder / _manifest_name(kind))
    if folder.parent == folder_of(kind):
        return _entry(folder, kind)
    names = source.formats if source else None
    formats = f"{names.experts}-{names.dense}" if names else ""
    origin = source.origin if source else ""
    return Entry(folder.name, kind, folder, "", formats, origin, managed=False)


def _made_from(origin: Path, formats: str) -> tuple[Entry, ...]:
    """The packs in the library that were made from a local folder or file, also before it was changed."""
    names = origins.names_of(origin)
    found = (each for each in entries() if each.kind is EntryKind.PACK and each.name in names)
    return tuple(each for each in found if formats in ("", each.formats))


def _means(reference: Reference, entry: Entry) -> bool:
    wanted = reference.name.lower()
    is_named = wanted == entry.name.lower() or (
        bool(entry.spoken) and wanted == entry.spoken.lower()
    )
    return is_named and reference.formats in ("", entry.formats)
