"""An entry of the library: one model on disk, with its name and the command that creates it again."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ktcli import manifest
from ktcli.errors import BadCheckpoint, KtError
from ktcli.ggufname import is_gguf
from ktcli.records import dataclass
from ktcli.smallfiles import Holder
from ktcli.store import catalog, contents, importances, origins
from ktcli.store.places import LOCAL, EntryKind, checkpoint_path
from ktcli.store.profile import HUBS
from ktcli.store.reference import parse, repository_named, shown

BUILTIN = "kt-mini"
INTERRUPTED = "interrupted"


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
        managed: whether it lies in one's own library, so that `kt rm` may remove it.
        shared: the further library that it lies in, which kt only reads; None: it lies in none.
        work: the process that works on it at this moment; None: none does.
        spoken: for a pack of a folder outside the library, the name of that folder, where it means no other
            model; for a file in another program's store the name that finds it there; else empty.
        importing: the arguments of the import that goes on or was interrupted; else empty.
    """

    name: str
    kind: EntryKind
    path: Path
    problem: str = ""
    formats: str = ""
    source: str = ""
    managed: bool = True
    shared: Path | None = None
    work: Holder | None = None
    spoken: str = ""
    importing: str = ""

    @property
    def in_library(self) -> bool:
        """Whether the entry is in a library, the user's own or a further library, so that its name finds it."""
        return self.managed or self.shared is not None

    @property
    def complete(self) -> bool:
        """Whether the entry has no problem, so that it can be used."""
        return not self.problem

    @property
    def is_stream(self) -> bool:
        """Whether the entry is a conversion that has a working folder: while its checkpoint is downloaded to make or
        repair it.
        """
        return self.kind is EntryKind.PACK and (self.path / manifest.STREAM).is_dir()

    @property
    def running(self) -> bool:
        """Whether the entry is incomplete and a process works on it."""
        return self.work is not None and not self.complete

    @property
    def done(self) -> float | None:
        """The fraction of the entry's bytes (0 to 1) that the process working on it has written so far; None: unknown,
        or no process works on it.
        """
        if not self.running or self.work is None or not self.work.total_bytes:
            return None
        # Beside its own files may lie what they are made from.
        is_pack = self.kind is EntryKind.PACK
        here = contents.written_bytes(self.path, below=not is_pack)
        return min(1.0, here / self.work.total_bytes)

    @property
    def label(self) -> str:
        """The name by which commands find exactly this entry: with its formats if it is a conversion; outside the
        library, its path.
        """
        if not self.in_library:
            return self.name if self.name == BUILTIN else self.spoken or str(self.path)
        return shown(self.spoken or self.name, self.formats)

    @property
    def shown(self) -> str:
        """The name of the entry's model as users type it, without formats."""
        return shown(self.name)

    @property
    def library_label(self) -> str:
        """The entry's `label`, spelt as the folders of a library are: without a colon or slash."""
        if not self.in_library:
            return self.label
        name = self.spoken or self.name
        return f"{name}@{self.formats}" if self.formats else name

    @property
    def again(self) -> str:
        """The kt command that continues or repeats the pull, conversion or import that the entry came from; where its
        arguments are not known, with placeholders such as FOLDER.
        """
        if self.importing:
            return f"kt import {self.importing}"
        if self.is_stream and not self.complete:
            return f"{self._pull} --stream"
        if self.kind is EntryKind.PACK:
            if self.name.startswith(LOCAL):
                origin = origins.shown(self.name) or "FOLDER"
                return f"kt convert {quote(origin)}@{self.formats}"
            if self.complete and not self.has_source:
                if self._is_merged:
                    return f"kt convert MODEL@{self.formats} --adapter ADAPTER --as {self.name}"
                return "kt import FILE.tar"  # it came from there under a name of its own
            # With an importance in the library, the name alone means a calibrated conversion.
            is_usual = is_recommended(self) and not importances.every(self.name)
            return f"kt convert {self.shown if is_usual else self.label}"
        return self._pull

    @property
    def _is_merged(self) -> bool:
        """Whether an adapter was merged into its weights."""
        try:
            found = manifest.read(self.path / manifest.PACK)
        except BadCheckpoint:
            return False
        return found is not None and bool(found.adapter)

    @property
    def has_source(self) -> bool:
        """Whether the checkpoint of the entry's model can be found by the entry's name: on disk, on a hub, or built
        in.
        """
        if self.name == BUILTIN or checkpoint_path(self.name).is_dir():
            return True
        try:
            return bool(parse(self.name).repository or repository_named(self.name))
        except KtError:
            return False

    @property
    def _pull(self) -> str:
        """The command that pulls its model."""
        # The shortest reference that means this entry: a recorded commit is not part of most names.
        read_back = repository_named(self.name)
        for text in (self.name, self.source.rpartition("@")[0], self.source, read_back):
            try:
                reference = parse(text)
            except KtError:
                continue
            if reference.repository and reference.name == self.name:
                return f"kt pull {text}"
        return f"kt pull {self.source or self.name}"

    @property
    def repair(self) -> str:
        """The command that restores the damaged files of the entry, or else all of it; where there is none, a phrase
        that tells what to do.
        """
        return f"kt verify {self.label} --repair" if self._has_repair else self.remake

    @property
    def _has_repair(self) -> bool:
        """Whether damaged files can be brought back while the others stay: its manifest tells which these are, and what
        they are made from is there or on a hub."""
        try:
            found = manifest.read(self.path / self.kind.manifest) if self.managed else None
        except BadCheckpoint:
            return False
        if found is None or found.seal is manifest.Seal.BROKEN:
            return False
        if found.adapter or (
            found.calibration and importances.path_for(self.name, found.calibration) is None
        ):
            return False
        if self.kind is EntryKind.PACK and self.name.startswith(LOCAL):
            origin = origins.origin_of(self.name)
            return origin is not None and origin.exists()
        is_here = self.name == BUILTIN or checkpoint_path(self.name).is_dir()
        return found.hub in HUBS or (self.kind is EntryKind.PACK and is_here)

    @property
    def remake(self) -> str:
        """The commands that restore all of a damaged entry; where there are none, a phrase that tells what to do."""
        if self.managed:
            return f"kt rm {self.label} && {self.again}"
        if self.shared is not None:
            return f"ask the owner of {self.shared}, which kt only reads"
        if self.kind is EntryKind.PACK:
            return (
                f"rm -r {quote(str(self.path))} && kt convert MODEL --out {quote(str(self.path))}"
            )
        return f"copy its files to {self.path} again"

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the entry's files; in a folder, files behind links are not counted."""
        if is_gguf(self.path.name):
            return sum(part.stat().st_size for part in contents.parts(self.path))
        return contents.bytes_below(self.path)


def is_recommended(entry: Entry) -> bool:
    """Returns whether an entry has the number formats that the profile of its model recommends, which a conversion gets
    by default; False if there is no profile.
    """
    profile = catalog.find(entry.name)
    return profile is not None and entry.formats == f"{profile.experts}-{profile.dense}"
