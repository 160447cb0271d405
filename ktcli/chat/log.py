"""The log file of a conversation: records that are only appended, one JSON object per line.

The first line names the format and the model. Then come the system text, settings, questions, the ids that the model
read (what is new of them) and each token of an answer when it is there. Each line ends with a checksum of itself, so
that a line that was torn by a kill, or damaged on the disk, is known: a torn last line never was, any other leaves
U+FFFD in its place, and the rest is read. A file is hostile input all the same: checksums are easily made.

    {"kt_chat": 2, "model": "kt-mini", "asked": "kt-mini", "pack": "1f0c…", "crc": "…"}
    {"settings": {"sampling": {…}, "max_tokens": null, …}, "crc": "…"}
    {"system": "Be brief.", "crc": "…"}
    {"user": "What is kt?", "time": 1766000000, "crc": "…"}
    {"read": [ids], "kept": 0, "at": 57, "crc": "…"}     after the first `kept` ids of what was there; at: characters
                                                         depths: [[n, byte], …], how all ids so far were computed:
                                                         deferral, + 128 in the absorbed form (engine/forms.py)
    {"piece": "It", "ids": [4], "crc": "…"}              begins an answer, or goes on with it
                                                         defer: that byte from these ids on; an answer begins with 0
    {"end": "stop", "crc": "…"}
    {"turns": 2, "crc": "…"}                             only so many messages remain
    {"omit": 4, "summary": "…", "crc": "…"}              the model reads the summary, if any, instead of the first 4
    {"assistant": "Yes.", "ids": [7], "at": 90, "crc": "…"}    an answer as a whole
    {"model": "…", "asked": "…", "pack": "…", "crc": "…"}      from here on another model answers; with "server": "…"
                                                         one that a server has, of which no ids are known
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ktcli import smallfiles
from ktcli.chat.conversation import Saved
from ktcli.chat.replay import Record, Replay
from ktcli.errors import Busy, KtError, UsageError, gib

VERSION = 2
SUFFIX = ".jsonl"
MAX_BYTES = 256 << 20  # four million tokens
MAX_LINE_BYTES = 64 << 20  # of a question; standard input may hold less
LOOKS, LOOK_S = 4, 0.02  # tries to lock a file, and the seconds between them


# --- lines ------------------------------------------------------------------------------------------


def line_of(record: Mapping[str, Any]) -> bytes:
    """Returns the line of a log file that holds a record: its JSON object, ending with a checksum, and a newline."""
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body)


def record_of(line: bytes) -> Record | None:
    """Returns the record in a line of a log file; None if the line is damaged."""
    body, mark, crc = line.rstrip(b"\n").rpartition(b',"crc":"')
    body += b"}"
    if not mark or crc != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


# --- reading ----------------------------------------------------------------------------------------


def read(file: BinaryIO, path: Path) -> tuple[Saved, int]:
    """Returns the conversation in a log file, and the size in bytes of the file without a torn last line.

    Raises:
        UsageError: it is no conversation, too large, or of another version.
    """
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BYTES:
        raise UsageError(f"{path} is {gib(size)}; the limit for a chat is {gib(MAX_BYTES)}")
    replay = Replay()
    whole = sound = 0
    for index, line in enumerate(_lines(file)):
        if not line.endswith(b"\n"):
            break  # torn: it was being written
        whole += len(line)
        record = record_of(line)
        if index == 0:
            _require_version(record, line, path)
        sound += record is not None
        replay.take(record)
    if not sound:
        raise UsageError(
            f"{path} is not a chat file of kt",
            hint="kt chats lists them all; kt chats rm NAME removes one",
        )
    return replay.saved(), whole


def _require_version(record: Record | None, line: bytes, path: Path) -> None:
    """Refuses a conversation whose first line names another version; one that cannot be read names none."""
    if record is None:  # checksums may be what is different there
        with contextlib.suppress(ValueError):
            record = smallfiles.json_object(line)
            record = record if "crc" not in record else None
    version = VERSION if record is None else record.get("kt_chat", VERSION)
    if version != VERSION:
        raise UsageError(
            f"{path} comes from another version of kt: its format is {str(version)[:20]}"
        )


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file, cut where they are longer than any record is."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES else line + b"\n"


# --- writing ----------------------------------------------------------------------------------------


class Log:
    """The file of a conversation, open and locked for this process.

    Attributes:
        path: its name now.
        content: what the writer knows of what is in it; it changes together with that, wherever Ctrl-C comes between.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.content: Any = None
        self._descriptor, self._size = descriptor, size
        self._torn = True  # behind `_size` may be what nobody finished writing

    @classmethod
    def create(cls, path: Path) -> Log:
        """Creates the log file of a conversation, which must not exist yet; returns it, open and locked.

        Raises:
            FileExistsError: there is one of this name. OSError: the system refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):
            smallfiles.sync_folder(path.parent)
        return cls(path, descriptor, 0)

    @classmethod
    def open(cls, path: Path) -> tuple[Log, Saved]:
        """Opens and locks the log file of a conversation for appending; returns it, and the conversation in it.

        Raises:
            Busy: another process has it open. UsageError: it is no conversation. OSError: it may not be written.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"{path} is not a plain file")
            _lock(descriptor, path)
            with open(os.dup(descriptor), "rb") as file:
                saved, size = read(file, path)
            closing.pop_all()
        return cls(path, descriptor, size), saved

    def add(self, records: list[Record], content: Any, *, sync: bool) -> None:
        """Appends records to the log file; first cuts off what an append that failed has left behind.

        Args:
            content: the value of the attribute `content` once the records are written.
            sync: whether to wait until the records are on the disk.
        Raises:
            OSError: the system refuses.
        """
        data = b"".join(map(line_of, records))
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
        self._torn = True
        view, at = memoryview(data), self._size
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written
        if sync:
            os.fsync(self._descriptor)
        self._size, self._torn, self.content = at, False, content  # no call between: a signal waits

    def is_mine(self) -> bool:
        """Returns whether the path still names this open file, and no other process has written to it."""
        try:
            there, here = os.lstat(self.path), os.fstat(self._descriptor)
        except OSError:
            return False
        return os.path.samestat(there, here) and (self._torn or here.st_size == self._size)

    def date(self, least_ns: int) -> None:
        """Sets the file's modification time to at least `least_ns`."""
        if os.fstat(self._descriptor).st_mtime_ns < least_ns:
            os.utime(self._descriptor, ns=(least_ns, least_ns))

    def read(self) -> Saved:
        """Returns the conversation in the log file."""
        with open(self.path, "rb") as file:
            return read(file, self.path)[0]

    def close(self) -> None:
        """Unlocks and closes the log file."""
        os.close(self._descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Locks a conversation for this process; somebody may be looking whether it is open, for a moment."""
    for left in range(LOOKS, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise busy(path) from None
            time.sleep(LOOK_S)


def read_path(path: Path) -> Saved:
    """Returns the conversation in a file that may be open for writing elsewhere.

    Raises:
        UsageError: it is no conversation, or it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"{path} is not a plain file")
            return read(file, path)[0]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def is_open(path: Path) -> bool:
    """Returns whether a process has a conversation's file open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def busy(path: Path) -> KtError:
    """Returns the error to raise for a conversation that another process has open."""
    return Busy(f"the chat {path.stem} is open in another kt", hint="close it there first")
