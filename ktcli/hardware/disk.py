"""The disk of a folder: its size, the space that is free for us, and whether it is a hard disk."""

from __future__ import annotations

import os
from pathlib import Path

from ktcli.hardware.machine import Disk
from ktcli.hardware.text import read_int


def read_disk(folder: Path) -> Disk | None:
    """Returns the size, the free bytes and the kind of the disk that holds `folder`, which need not exist yet; None if
    no folder above it can be examined.
    """
    here = folder.absolute()
    while here != here.parent:
        try:
            stat, status = os.statvfs(here), os.stat(here)
        except OSError:
            here = here.parent
            continue
        return Disk(
            path=str(folder),
            size_bytes=stat.f_blocks * stat.f_frsize,
            free_bytes=stat.f_bavail * stat.f_frsize,
            rotational=_rotational(status.st_dev),
        )
    return None


def _rotational(device: int) -> bool | None:
    """The block layer's answer whether a device spins; a partition's stands at its whole disk."""
    block = Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}"
    for folder in (block, block / ".."):
        answer = read_int(folder / "queue/rotational")
        if answer is not None:
            return answer == 1
    return None
