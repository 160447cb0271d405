"""The file of a request trace that a server records: a line per request (`measure.request_trace`), appended.

Only its owner can read it, one server writes it at a time, and it does not grow without end. Blocks are numbered by a
keyed hash of all token ids up to their end, whose key is random and kept beside the library's models: without that key
nobody can tell whether a guessed text is in a trace, and with it a trace can be gone on with after a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from pathlib import Path

import numpy as np

from ktcli import config, smallfiles
from ktcli.errors import Busy, KtError, UsageError, gib
from ktcli.measure.request_trace import MOST_LINE_BYTES, TracedRequest
from ktcli.native import PAGE_TOKENS

BLOCK_TOKENS = PAGE_TOKENS  # what the engine shares
MOST_BYTES = 256 << 20  # of a trace: 80,000 prompts of 12,000 tokens
_KEY_FILE, _KEY_BYTES = "trace.key", 32
_ID_BITS = 53  # that every reader of JSON keeps


class BlockHasher:
    """Assigns numbers to the blocks of prompts, by a keyed hash.

    Args:
        key: the key of the hashes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_library(cls) -> BlockHasher:
        """Returns the hasher with the library's key, which is created if there is none.

        Raises:
            KtError: the key cannot be read or written.
        """
        path = smallfiles.make_folder(config.home()) / _KEY_FILE
        try:
            with contextlib.suppress(FileNotFoundError):
                key = smallfiles.read_bounded(path, _KEY_BYTES)
                if len(key) == _KEY_BYTES:
                    return cls(key)
            key = secrets.token_bytes(_KEY_BYTES)
            smallfiles.write(path, key, 0o600, tidies=False)
        except OSError as error:
            raise KtError(
                f"cannot use the key of traces {path}: {error.strerror}",
                hint="remove it, or set KT_HOME to a writable folder; traces begin anew then",
            ) from error
        return cls(key)

    def numbers(self, space: str, ids: Sequence[int]) -> list[int]:
        """Returns a number for each block of a prompt, the last of which may be shorter.

        Args:
            space: whatever else decides who shares blocks: model, adapter, salt.
        """
        link = blake2b(
            space.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32
        ).digest()
        data = np.asarray(ids, np.int64).astype("<i8").tobytes()
        found = []
        for start in range(0, len(data), 8 * BLOCK_TOKENS):
            block = data[start : start + 8 * BLOCK_TOKENS]
            link = blake2b(link + block, key=self._key, digest_size=32).digest()
            found.append(int.from_bytes(link[:8], "little") >> (64 - _ID_BITS))
        return found


class TraceFile:
    """A trace that is open for appending, and locked.

    Attributes:
        path: its path.
        since_ms: the time of the trace at which it was opened, as of the lines before.
    """

    def __init__(self, path: Path, descriptor: int, size_bytes: int, since_ms: int) -> None:
        self.path, self.since_ms = path, since_ms
        self._descriptor, self._size = descriptor, size_bytes

    @classmethod
    def open(cls, path: Path) -> TraceFile:
        """Returns a trace file opened for appending, created if need be; an incomplete line of a killed server is cut
        off.

        Raises:
            UsageError: it is not a trace of blocks of BLOCK_TOKENS, others can read it, or it is full.
            Busy: another process records into it.
            KtError: it cannot be written.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.ExitStack() as closing:
            try:
                descriptor = os.open(path, flags, 0o600)
                closing.callback(os.close, descriptor)
                _require_private(path, os.fstat(descriptor))
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size, since_ms = _end_of(path, descriptor)
            except BlockingIOError:
                raise Busy(
                    f"another process records into {path}", hint="name another file"
                ) from None
            except (OSError, ValueError) as error:  # a zero byte in the name
                said = getattr(error, "strerror", None) or "invalid file name"
                raise KtError(f"cannot write the trace {path}: {said}") from error
            closing.pop_all()
        return cls(path, descriptor, size, since_ms)

    def append(self, lines: Sequence[TracedRequest]) -> bool:
        """Appends requests, in the order of their arrival; returns whether there is room for more.

        Raises:
            OSError: the disk is full, or fails; what was written of them is taken back.
        """
        for line in lines:
            data = json.dumps(line._asdict(), separators=(",", ":")).encode() + b"\n"
            if self._size + len(data) > MOST_BYTES:
                return False
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(data)
        return True

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        os.close(self._descriptor)


def _require_private(path: Path, found: os.stat_result) -> None:
    """Checks that a file is plain, and its owner's alone. Raises: UsageError: it is not."""
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"cannot record into {path}: it is not a plain file")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UsageError(
            f"others can read or write {path}, and a trace tells when how much was asked",
            hint=f"chmod 600 {path}, or name another file",
        )


def _end_of(path: Path, descriptor: int) -> tuple[int, int]:
    """Returns the bytes of a trace without a line that was not finished, and the milliseconds at which it goes on.

    Raises:
        UsageError: it is not a trace, has blocks of another size, or is full.
    """
    found = os.fstat(descriptor)
    tail = os.pread(descriptor, MOST_LINE_BYTES, max(0, found.st_size - MOST_LINE_BYTES))
    size = found.st_size - (len(tail) - tail.rfind(b"\n") - 1)
    lines = tail[: tail.rfind(b"\n") + 1].splitlines()
    if not found.st_size:
        return 0, 0
    try:
        for line in lines[-1:] if found.st_size > len(tail) else lines[:1] + lines[-1:]:
            last = TracedRequest.read(line)
            if -(-last.input_length // BLOCK_TOKENS) != len(last.hash_ids):
                raise ValueError(line)
        if not lines:
            raise ValueError(tail)
    except ValueError:
        raise UsageError(
            f"{path} holds something other than a trace in blocks of {BLOCK_TOKENS} tokens",
            hint="name another file",
        ) from None
    if size >= MOST_BYTES:
        raise UsageError(
            f"the trace {path} has {gib(size)}, and kt records at most {gib(MOST_BYTES)}",
            hint="name another file",
        )
    if size < found.st_size:
        os.ftruncate(descriptor, size)
    passed_ms = max(0.0, 1e3 * (time.time() - found.st_mtime))
    return size, ceil(last.timestamp + passed_ms)
