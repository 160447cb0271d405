"""Finds the conversion for a name if it already exists: then neither a pull nor a conversion is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ktcli.errors import UsageError
from ktcli.manifest import PACK as PACK_MANIFEST
from ktcli.records import dataclass
from ktcli.store import contents, library
from ktcli.store.entry import BUILTIN, Entry
from ktcli.store.places import EntryKind
from ktcli.store.reference import Reference, parse, split_adapter
from ktcli.weights.extras import extra_limit
from ktcli.weights.gguf.header import gguf_at


@dataclass(frozen=True, slots=True)
class Ready:
    """A converted model on disk.

    Attributes:
        name: the name for people.
        pack: its folder, which holds the tokenizer's files too.
        adapter: the adapter of the library that it is used with; empty: none.
    """

    name: str
    pack: Path
    adapter: str = ""

    @property
    def base(self) -> str:
        """The name of the model for people, without "+ADAPTER"."""
        return self.name.removesuffix(f"+{self.adapter}") if self.adapter else self.name


def at_hand(name: str) -> Ready | None:
    """Returns the existing conversion on disk that `name` means, with its adapter if it names one; None: there is none
    that can be loaded as it is, and `prepare` has to make one.

    Raises:
        UsageError: the name means nothing, or a conversion to other formats than it says.
        NotFound, BadCheckpoint: as `meant`, or there is no such adapter, or its manifest is damaged.
    """
    model, adapter = split_adapter(name)
    found = usable(*meant(model))
    return None if found is None else adapted(found, adapter)


def adapted(ready: Ready, adapter: str) -> Ready:
    """Returns the converted model, to be used with the adapter of this name in the library; unchanged if `adapter` is
    empty.

    Raises:
        NotFound, BadCheckpoint: there is no such adapter, or its manifest is damaged.
    """
    if not adapter:
        return ready
    from ktcli.store import adapters  # few models have one

    name = adapters.resolve(adapter).name
    return replace(ready, name=f"{ready.name}+{name}", adapter=name)


def meant(name: str, formats: str = "") -> tuple[Reference, Entry | None]:
    """Returns the parsed reference that a name stands for, with these formats if any are given, and the model's entry
    on disk; the entry is None if nothing is there.

    Raises:
        UsageError: the name means nothing.
        NotFound, BadCheckpoint: it is a local folder, or a model of another program's store, that does not exist or has
            no model that can be read.
    """
    reference = parse(name)
    if formats:
        reference = replace(reference, formats=formats)
    found = library.find(f"{reference.shown}@{formats}" if formats and reference.name else name)
    return reference, found


def usable(reference: Reference, entry: Entry | None) -> Ready | None:
    """Returns the entry as a conversion that is ready to load; None: the entry is no conversion, or was made from the
    built-in model of an earlier kt.

    Raises:
        UsageError: the conversion has other formats than the reference names.
    """
    if entry is None or entry.kind is not EntryKind.PACK:
        return None
    if reference.formats not in ("", entry.formats):
        raise UsageError(
            f"{reference.text} has the formats {entry.formats}, not {reference.formats}"
        )
    return None if is_stale(entry) else Ready(entry.shown, entry.path)


def is_stale(pack: Entry) -> bool:
    """Returns whether a pack in the library was made from the built-in model of an earlier version of kt."""
    shipped = library.find(BUILTIN, EntryKind.CHECKPOINT) if pack.name == BUILTIN else None
    if shipped is None or not pack.in_library:
        return False
    return newest_ns(shipped.path) > (pack.path / PACK_MANIFEST).stat().st_mtime_ns


def newest_ns(path: Path) -> int:
    """Returns the time of the last write to any file that a conversion reads from `path`, in nanoseconds since 1970; 0
    if there is no such file.
    """
    if (file := gguf_at(path)) is not None:
        return max((part.stat().st_mtime_ns for part in contents.parts(file)), default=0)
    taken = (
        each
        for each in path.iterdir()
        if (each.suffix == ".safetensors" or extra_limit(each.name)) and each.is_file()
    )
    return max((each.stat().st_mtime_ns for each in taken), default=0)
