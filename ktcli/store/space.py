"""Counts the disk space of the library: checkpoints, conversions and KV pages of models, and the rest."""

from __future__ import annotations

from collections import Counter, defaultdict

from ktcli import config
from ktcli.records import dataclass
from ktcli.store import contents, library, removal
from ktcli.store.entry import Entry
from ktcli.store.pagefolder import OtherVersion, PageFolder
from ktcli.store.places import EntryKind


@dataclass(frozen=True, slots=True)
class Taken:
    """The bytes that one model takes in the library."""

    name: str
    checkpoint_bytes: int
    packs_bytes: int
    pages_bytes: int

    @property
    def total_bytes(self) -> int:
        """The number of bytes of the model's checkpoint, conversions and stored KV pages together."""
        return self.checkpoint_bytes + self.packs_bytes + self.pages_bytes


def by_model() -> tuple[Taken, ...]:
    """Returns the bytes that each model takes in the user's own library (see `Taken`), the largest model first."""
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    spoken = {}
    for entry in library.entries():
        if entry.managed:
            spoken[entry.name] = entry.spoken or entry.name
            sizes[entry.name][entry.kind.value] += entry.size_bytes
    try:
        for pages in PageFolder.of_library().stored():
            sizes[pages.model]["pages"] += pages.size_bytes
    except OtherVersion:
        pass  # `all_bytes` counts them
    kinds = (EntryKind.CHECKPOINT.value, EntryKind.PACK.value, "pages")
    found = (
        Taken(spoken.get(name, name), *(each[kind] for kind in kinds))
        for name, each in sizes.items()
    )
    return tuple(sorted(found, key=lambda each: (-each.total_bytes, each.name)))


def left_bytes() -> int:
    """Returns the number of bytes in folders of the library left by killed processes, which `kt prune` removes."""
    return sum(map(contents.bytes_below, removal.leftovers()))


def all_bytes() -> int:
    """Returns the total size in bytes of every file in the library folder: models, and chats, settings and records."""
    return contents.bytes_below(config.home())


def converted() -> tuple[Entry, ...]:
    """Returns the entries of the complete checkpoints in the user's own library whose model also has a complete
    conversion there.
    """
    entries = [each for each in library.entries() if each.managed and each.complete]
    packs = {each.name for each in entries if each.kind is EntryKind.PACK}
    return tuple(
        each for each in entries if each.kind is EntryKind.CHECKPOINT and each.name in packs
    )
