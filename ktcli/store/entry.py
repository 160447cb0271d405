"""An entry of the library: one model on disk, with the name that finds it and the command that makes it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from ktcli.errors import UsageError
from ktcli.smallfiles import Holder
from ktcli.store import catalog, contents, origins
from ktcli.store.places import LOCAL, EntryKind
from ktcli.store.reference import GGUF, parse, repository_named

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
        managed: whether it lies in the library folder, so that `kt rm` may remove it.
        work: the process that works on it at this moment; None: none does.
        spoken: for a pack of a folder outside the library, the name of that folder, where it means no other
            model; else empty.
        importing: the arguments of the import that goes on or was interrupted; else empty.
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
    importing: str = ""

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
        return min(1.0, contents.written_bytes(self.path) / self.work.total_bytes)

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
        if self.importing:
            return f"kt import {self.importing}"
        if self.kind is EntryKind.PACK:
            if self.name.startswith(LOCAL):
                origin = origins.origin_of(self.name) or "FOLDER"
                return f"kt convert {quote(str(origin))}@{self.formats}"
            return f"kt convert {self.name if is_recommended(self) else self.label}"
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
            return sum(part.stat().st_size for part in contents.parts(self.path))
        return contents.bytes_below(self.path)


def is_recommended(entry: Entry) -> bool:
    """Returns whether an entry has the formats that a conversion gets when nobody asks for others."""
    profile = catalog.find(entry.name)
    return profile is not None and entry.formats == f"{profile.experts}-{profile.dense}"
