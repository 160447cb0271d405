"""Records which requests a server gets, for `kt bench cache`: when, how long, and which blocks of prompts are the same.

Handlers only note a request and its end; a thread of its own hashes and writes. Lines come in the order of arrival, so
one is written when all before it have ended.

The file (`measure.request_trace`) can be read by its owner only, one server appends to it at a time, and it does not
grow without end. Blocks are numbered by a keyed hash of all token ids up to their end, whose key is random and kept
beside the library's models: without that key nobody can tell whether a guessed text is in a trace, and with it a trace
can be gone on with after a restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from math import ceil
from pathlib import Path

import numpy as np

from ktcli import config, smallfiles
from ktcli.errors import Busy, KtError, UsageError, gib
from ktcli.measure.request_trace import MOST_LINE_BYTES, TracedRequest
from ktcli.native import PAGE_TOKENS
from ktcli.records import dataclass
from ktcli.threads import Daemon

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
        """Returns a hasher of prompt blocks with the library's secret key, which is created if there is none.

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
        """Returns for each block of BLOCK_TOKENS tokens of a prompt a keyed hash, of 53 bits, of all token ids up to
        its end; the last block may be shorter.

        Args:
            space: what else decides whether prompts share blocks, as one text: model, adapter, salt.
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
        """Returns the trace file at `path`, locked and opened for appending, created if need be; an incomplete line of
        a killed server is cut off.

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
        """Appends requests to the trace, in the order of arrival, up to MOST_BYTES in all; returns whether all fit.

        Raises:
            OSError: the disk is full, or fails; an incomplete line is removed again.
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


# Requests that wait for one before them, or to be hashed. Beyond that the first is written as if it had ended, so that
# an answer of hours holds nothing up; what cannot be hashed in time is left out.
MOST_WAITING = 1024
_CLOSE_S = 5.0


@dataclass(eq=False, slots=True)
class _Recorded:
    """A request that is written when it has ended.

    Attributes:
        arrived_ms: when it came, in the time of the trace.
        ids: the prompt; empty once it is hashed.
        answer: the tokens of its answers; None: it has not ended.
    """

    arrived_ms: int
    space: str
    ids: Sequence[int]
    length: int
    hash_ids: list[int] | None = None
    answer: int | None = None


class RequestRecorder:
    """Writes requests into a trace.

    Args:
        warn: called when recording ends early, with the reason.
    """

    def __init__(self, file: TraceFile, hasher: BlockHasher, warn: Callable[[str], None]) -> None:
        self._file, self._hasher, self._warn = file, hasher, warn
        self._began_s = time.monotonic()
        self._waiting: deque[_Recorded] = deque()
        self._unhashed: list[_Recorded] = []  # of these
        self._changed = threading.Condition()
        self._closing = False
        self._ended = False  # early
        self._thread = Daemon(self._run, name="kt-trace")
        self._thread.start()

    def begin(self, space: str, ids: Sequence[int]) -> Callable[[int], None]:
        """Records the arrival of a request with these prompt ids; returns a function that records its end, given the
        number of tokens of its answers. Both may be called on any thread.

        Args:
            space: what else decides whether prompts share blocks, see `BlockHasher.numbers`.
        """
        with self._changed:
            passed_ms = 1e3 * (time.monotonic() - self._began_s)
            made = _Recorded(self._file.since_ms + int(passed_ms), space, ids, len(ids))
            if not (self._ended or self._closing) and len(self._waiting) < 2 * MOST_WAITING:
                self._waiting.append(made)
                self._unhashed.append(made)
                self._changed.notify()
        return partial(self._end, made)

    def _end(self, request: _Recorded, tokens: int) -> None:
        with self._changed:
            request.answer = tokens
            self._changed.notify()

    def close(self) -> None:
        """Writes all pending requests into the trace, unfinished ones as if they had ended, and closes the file; waits
        at most 5 seconds for that."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    # --- on the recorder's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._unhashed or self._due()):
                    self._changed.wait()
                new, self._unhashed = self._unhashed, []
                due, last = self._due(), self._closing
            for each in new:
                each.hash_ids, each.ids = self._hasher.numbers(each.space, each.ids), ()
            if due:
                self._write(due)
            if last:
                self._file.close()
                return

    def _due(self) -> list[_Recorded]:
        """Returns the requests at the beginning that can be written."""
        found: list[_Recorded] = []
        for each in self._waiting:
            held_up = len(self._waiting) - len(found) > MOST_WAITING or self._closing
            if each.answer is None and not held_up:
                break
            found.append(each)
        return found

    def _write(self, due: Sequence[_Recorded]) -> None:
        lines = [
            TracedRequest(each.arrived_ms, each.length, each.answer or 0, each.hash_ids or [])
            for each in due
        ]
        said = ""
        try:
            if not self._file.append(lines):
                said = f"it has {gib(MOST_BYTES)}, the most that kt records"
        except OSError as error:
            said = str(error.strerror)
        with self._changed:
            for _ in due:
                self._waiting.popleft()
            if said:
                self._ended = True
                self._waiting.clear()
                self._unhashed.clear()
        if said:
            self._warn(f"requests are no longer recorded into {self._file.path}: {said}")
