"""Writes files that are either complete or not there: under another name, flushed, renamed, hashed on the way."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import KtError, NotEnoughDisk
from ktcli.weights.stages import Stopwatch

# Flush now and then, so that the last flush does not stand still for minutes.
FLUSH_BYTES = 256 << 20


class FileWriter:
    """One file: `write` its parts, then `finish`. Leaving the `with` block earlier removes it.

    Hashing and writing happen in a thread of their own, in order; a part must not be changed after it
    was handed over. Errors of the system surface as OSError in `write` or `finish`.

    Attributes:
        size_bytes: bytes handed over so far.
    """

    def __init__(self, path: Path, clock: Stopwatch | None = None) -> None:
        """clock: runs while this file is being hashed or written."""
        self._path, self._clock = path, clock or Stopwatch()
        self._beside = path.with_name(path.name + smallfiles.SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._beside, flags, 0o644)
        self._hash = sha256()
        self._unflushed = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kt-write")
        self._writing: Future[None] | None = None
        self.size_bytes = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        os.close(self._file)
        if kind is not None:
            self._beside.unlink(missing_ok=True)

    def write(self, part: memoryview | bytes) -> None:
        """Appends `part`; returns when the one before is written."""
        self.size_bytes += len(part)
        self._settle()
        self._writing = self._thread.submit(self._put, part)

    def finish(self) -> str:
        """Completes the file: flushes it and gives it its name. Returns its SHA-256."""
        self._settle()
        with self._clock.running():
            os.fsync(self._file)
            os.rename(self._beside, self._path)
            smallfiles.sync_folder(self._path.parent)
        return self._hash.hexdigest()

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _put(self, part: memoryview | bytes) -> None:
        with self._clock.running():
            self._hash.update(part)
            view = memoryview(part)
            while view:
                view = view[os.write(self._file, view) :]
            self._unflushed += len(part)
            if self._unflushed >= FLUSH_BYTES:
                os.fdatasync(self._file)
                self._unflushed = 0


def free_bytes(folder: Path) -> int:
    """The free bytes of the disk of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def explained(what: str, folder: Path, need_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns a failure to write into one sentence.

    Args:
        need_bytes: returns the bytes that are still to be written; called when the disk is full.
    Raises:
        NotEnoughDisk: the disk is full.
        KtError: anything else the system refused.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NotEnoughDisk(what, need_bytes(), free_bytes(folder), str(folder)) from error
        raise KtError(
            f"{what} stopped: the system refused to write to {folder}: {error.strerror}",
            hint="what is complete is kept: free space, raise the limit or fix the folder, and run it again",
        ) from error
