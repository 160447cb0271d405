"""Writes files that are either complete or missing: under another name, flushed, renamed, and hashed on the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadPack, KtError, NotEnoughDisk
from ktcli.threadpool import Threads
from ktcli.weights.stages import Stopwatch

# Flush now and then, so that the last flush does not stand still for minutes.
FLUSH_BYTES = 256 << 20


class FileWriter:
    """A writer of one file: `write` its parts, then `finish`. Leaving the `with` block earlier removes it.

    A part is hashed and written at the same time, by two threads of their own, and a third flushes; parts keep their
    order. A part must not be changed after it was handed over until the next call returns. Errors of the system
    surface as OSError in `write` or `finish`.

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
        self._threads = Threads(3, "kt-write")
        self._part: list[Future[None]] = []
        self._flush: Future[None] | None = None
        self.size_bytes = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        os.close(self._file)
        if kind is not None:
            self._beside.unlink(missing_ok=True)

    def write(self, part: memoryview | bytes) -> None:
        """Appends `part` to the file; returns when the part before it is hashed and written. `part` must not change
        until the next call returns."""
        self.size_bytes += len(part)
        self._settle()
        self._part = [self._start(self._hash.update, part), self._start(self._put, part)]
        self._unflushed += len(part)

    def finish(self, wanted: str | None = None) -> str:
        """Completes the file: flushes it and renames it from its temporary name; returns its SHA-256, hexadecimal.

        Args:
            wanted: the SHA-256 that the file must have; None: any.
        Raises:
            BadPack: the file has another SHA-256; an existing file of its name stays as it is.
        """
        self._settle()
        self._end_flush()
        if wanted not in (None, self._hash.hexdigest()):
            raise BadPack(f"{self._path.name}, made again, has a checksum mismatch")
        with self._clock.running():
            os.fsync(self._file)
            os.rename(self._beside, self._path)
            smallfiles.sync_folder(self._path.parent)
        return self._hash.hexdigest()

    def _start(self, work: Callable[[Any], None], what: Any) -> Future[None]:
        def run() -> None:
            with self._clock.running():
                work(what)

        return self._threads.submit(run)

    def _settle(self) -> None:
        """The last part is hashed and written, and what was written is flushed now and then."""
        for each in self._part:
            each.result()
        self._part = []
        if self._unflushed >= FLUSH_BYTES:
            self._end_flush()
            self._flush, self._unflushed = self._start(os.fdatasync, self._file), 0

    def _end_flush(self) -> None:
        if self._flush is not None:
            self._flush.result()
            self._flush = None

    def _put(self, part: memoryview | bytes) -> None:
        view = memoryview(part)
        while view:
            view = view[os.write(self._file, view) :]


@contextmanager
def explained(what: str, folder: Path, need_bytes: Callable[[], int]) -> Iterator[None]:
    """Opens a context that turns an OSError into an error for the user, which names the work `what` in `folder` and the
    cause.

    Args:
        need_bytes: returns the bytes that are still to be written; called when the disk is full.
    Raises:
        NotEnoughDisk: the disk is full.
        KtError: any other OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NotEnoughDisk(
                what, need_bytes(), smallfiles.free_bytes(folder), str(folder)
            ) from error
        raise KtError(
            f"{what} stopped: the system refused to write to {folder}: {error.strerror}",
            hint="completed files are kept: free some space, raise the limit or fix the folder, and run it again",
        ) from error
