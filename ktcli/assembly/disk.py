"""Counts the disk space that a model needs on this machine before it runs: its download and its conversion."""

from __future__ import annotations

from ktcli import config
from ktcli.assembly.subject import Subject
from ktcli.hardware.disk import read_disk
from ktcli.models import build
from ktcli.planner.spec import weight_bytes
from ktcli.records import dataclass
from ktcli.store import library
from ktcli.store.places import EntryKind
from ktcli.weights.recipe import Recipe


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The bytes that are still to be written to the library's disk, and those that are free there."""

    download_bytes: int
    pack_bytes: int
    free_bytes: int

    @property
    def need_bytes(self) -> int:
        """The bytes that are still to be written to the disk: those of the download and of the conversion."""
        return self.download_bytes + self.pack_bytes

    @property
    def fits(self) -> bool:
        """Whether the free bytes of the disk suffice for download and conversion."""
        return self.need_bytes <= self.free_bytes


def disk_need(subject: Subject, recipe: Recipe) -> DiskNeed | None:
    """Returns the bytes of download and conversion that a model still needs on the library's disk, and those free
    there; None: the free space is unknown.

    Raises:
        UsageError: the setting of the library folder does not name a folder that can be used.
    """
    disk = read_disk(config.home())
    if disk is None:
        return None
    if subject.pack is not None and recipe == subject.recipe:
        return DiskNeed(0, 0, disk.free_bytes)
    here = library.find(subject.said, EntryKind.CHECKPOINT) or library.find(subject.name)
    download = 0 if here is not None else subject.download_bytes
    return DiskNeed(download, weight_bytes(build(subject.config), recipe), disk.free_bytes)
