"""Frees the disk space of parts of a file while the file remains: file systems call this punching holes.

The file keeps its size, and reads as zeros where its bytes are gone. ext4, XFS, Btrfs, tmpfs and NFS 4.2 can do it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def can_punch(folder: Path) -> bool:
    """Returns whether the file system of a folder can free parts of a file (punch holes); this is tried on a temporary
    file.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            size = max(4096, os.fstat(file.fileno()).st_blksize)
            file.write(bytes([1]) * size)
            file.flush()
            _give_back(file.fileno(), 0, size)
            return os.pread(file.fileno(), 1, 0) == b"\0"
    except OSError:
        return False


def punch(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Frees ranges of bytes of a file on the disk (punches holes); they read as zeros. A range goes from its first byte
    to the one after its last.

    Raises:
        OSError: the file system cannot do it, or the disk failed.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for start, stop in ranges:
            _give_back(descriptor, start, stop - start)
    finally:
        os.close(descriptor)


def _give_back(descriptor: int, start: int, n_bytes: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_longlong(start), ctypes.c_longlong(n_bytes)
    if library.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, *where):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
