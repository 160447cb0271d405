"""Keeps what the engine prints in a file that only its owner can read and that never grows beyond a bound."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from ktcli.errors import KtError

LOG_BYTES = 1 << 20  # a log that has more loses its older half
_KEPT, _KEPT_CHARS = 200, 500  # of the last lines, for the reason why it ended


class BoundedLog:
    """The log of an engine.

    Args:
        path: the file; what an earlier engine wrote there is dropped.
    Raises:
        KtError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: deque[str] = deque(maxlen=_KEPT)
        self._size, self._problem = 0, ""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise KtError(f"cannot write the log {path}: {error.strerror}") from error

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, each shortened."""
        return tuple(self._last)

    def forget(self) -> None:
        """Clears the last lines in memory, not those of the file: another process begins."""
        self._last.clear()

    def write(self, line: bytes) -> None:
        """Adds a line; it is lost if the disk is full."""
        text = line.decode("utf-8", "replace").strip()
        if text:
            self._last.append(text[-_KEPT_CHARS:])
        try:
            if self._size + len(line) > LOG_BYTES:
                self._shorten()
            self._size += os.write(self._file, line)
        except OSError:
            return

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        file, self._file = self._file, -1
        os.close(file)

    def _shorten(self) -> None:
        kept = os.pread(self._file, LOG_BYTES // 2, max(0, self._size - LOG_BYTES // 2))
        kept = kept.partition(b"\n")[2]
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._size = os.write(self._file, kept)
