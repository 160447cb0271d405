"""Stores a partly downloaded file so that a killed process loses nothing that was written.

    NAME.part   the bytes, each at its place in the file
    NAME.done   a header that says which file it is and since which start of the machine it is written; then for each
                chunk two counters: the bytes of it that were written, and those that were flushed to the disk

A counter is written after the bytes it counts. What a killed process wrote stays in the page cache, so only what was
on the wire is fetched again. A power cut may keep counters and lose bytes: after another start of the machine only
what was flushed is trusted. So bytes are flushed every FLUSH_BYTES, and all of them before the file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import uuid
from pathlib import Path

from ktcli.records import dataclass

CHUNK_BYTES = 16 << 20  # one request; a gigabit line takes an eighth of a second for it
FLUSH_BYTES = 64 << 20  # of a file; an eighth of a second for a disk that writes 500 MB/s
_MAGIC = b"kt-part2"
_COUNTER = struct.Struct("<Q")
_START_BYTES = 36
_NO_START = bytes(_START_BYTES)
# Where the counters begin, behind magic, identity and start.
_ROWS = len(_MAGIC) + 32 + _START_BYTES
_START = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of the machine


@dataclass(frozen=True, slots=True)
class Located:
    """A file to fetch, with its address.

    Attributes:
        name: as it will be called in the folder.
        url, headers: where it is; the headers may hold a token.
        of_bytes: the size of the whole file, where only its first `size_bytes` are wanted; else 0.
        sha256, blob: its SHA-256 and its hash as a git blob, hexadecimal, as the hub gives them; may be empty.
    """

    name: str
    size_bytes: int
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    sha256: str = ""
    blob: str = ""
    of_bytes: int = 0


class PartialFile:
    """A file that is arriving, written by several threads. Nothing is opened before the first write."""

    def __init__(self, located: Located, folder: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.located = located
        self.bytes_path = folder / f"{located.name}.part"
        self.counters_path = folder / f"{located.name}.done"
        self._chunk = chunk_bytes
        self._lock = threading.Lock()  # held while descriptors are opened or closed
        self._descriptors: tuple[int, int] | None = None
        self._unflushed = 0  # bytes
        self._done, self._flushed = self._read_counters()
        # Held by whoever puts bytes into a chunk: a whole file that is sent where a range was asked for brings other
        # connections' chunks, too, and what is counted, and perhaps verified, must not be written again.
        self._writing = [threading.Lock() for _ in self._done]
        self._first_open = 0  # no chunk before it is open
        self.url = located.url
        self.single = threading.Lock()  # held by whoever gets the file as one stream

    @property
    def n_chunks(self) -> int:
        """The number of chunks in which the file is downloaded; 0 for an empty file."""
        return len(self._done)

    @property
    def arrived_bytes(self) -> int:
        """The number of bytes of the file that have arrived."""
        return sum(self._done)

    def missing(self, chunk: int) -> tuple[int, int]:
        """Returns the range of bytes of a chunk that is still missing, as offsets in the file: its first byte, and the
        one after its last.
        """
        start = chunk * self._chunk
        return start + self._done[chunk], min(start + self._chunk, self.located.size_bytes)

    def frontier(self) -> int:
        """Returns the number of bytes that have arrived from the beginning of the file without a gap."""
        while self._first_open < len(self._done):
            start, end = self.missing(self._first_open)
            if start < end:
                return start
            self._first_open += 1
        return self.located.size_bytes

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Writes `data` at `offset` in the file, skipping bytes that have arrived already and those of a chunk that
        leave a gap in it; returns how many bytes were new.
        """
        new, view = 0, memoryview(data)
        while view:
            chunk = offset // self._chunk
            piece = view[: (chunk + 1) * self._chunk - offset]
            with self._writing[chunk]:
                new += self._continue(chunk, offset, piece)
            offset += len(piece)
            view = view[len(piece) :]
        return new

    def _continue(self, chunk: int, offset: int, piece: memoryview) -> int:
        """Puts what a piece of a chunk has beyond those bytes that are there; returns how many these were."""
        start, end = self.missing(chunk)
        skipped = min(len(piece), max(0, start - offset))
        fresh = piece[skipped : skipped + max(0, end - offset - skipped)]
        if not fresh or offset + skipped != start:
            return 0
        self._put(chunk, start, fresh)
        return len(fresh)

    def open(self) -> int:
        """Returns the descriptor, for reading and writing, of the file on disk with the bytes that have arrived; the
        file is created if need be.
        """
        with self._lock:
            if self._descriptors is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                counters = os.open(self.counters_path, flags, 0o644)
                try:
                    if not self.arrived_bytes:
                        os.ftruncate(counters, 0)
                    pairs = zip(self._done, self._flushed, strict=True)
                    rows = b"".join(_COUNTER.pack(each) for pair in pairs for each in pair)
                    os.pwrite(counters, self._header() + _this_start() + rows, 0)
                    self._descriptors = os.open(self.bytes_path, flags, 0o644), counters
                except BaseException:
                    os.close(counters)
                    raise
            return self._descriptors[0]

    def close(self) -> None:
        """Closes the descriptors of the partial file, which stays on disk."""
        with self._lock:
            for descriptor in self._descriptors or ():
                os.close(descriptor)
            self._descriptors = None

    def remove(self) -> None:
        """Deletes the partial file from the disk, with its counters of what has arrived."""
        self.close()
        for path in (self.counters_path, self.bytes_path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        self._done, self._flushed = [0] * len(self._done), [0] * len(self._done)
        self._first_open = self._unflushed = 0

    def finish(self, path: Path) -> None:
        """Flushes the complete file to the disk and renames it to `path`, replacing an older one."""
        os.fsync(self.open())
        self.close()
        os.replace(self.bytes_path, path)
        self.counters_path.unlink(missing_ok=True)

    def _put(self, chunk: int, offset: int, data: memoryview) -> None:
        descriptor = self.open()
        assert self._descriptors is not None
        counters, size, at = self._descriptors[1], len(data), offset
        while data:
            written = os.pwrite(descriptor, data, at)
            at, data = at + written, data[written:]
        done = self._done[chunk] + size
        _count(counters, 2 * chunk, done)
        self._done[chunk] = done
        self._unflushed += size
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            self._flush(descriptor, counters)

    def _flush(self, descriptor: int, counters: int) -> None:
        """Flushes what is written, then counts it as flushed."""
        written = list(self._done)
        os.fdatasync(descriptor)
        for chunk, done in enumerate(written):
            if done > self._flushed[chunk]:
                _count(counters, 2 * chunk + 1, done)
                self._flushed[chunk] = done

    def _header(self) -> bytes:
        about = self.located
        # Without a hash nobody could tell the half of an old file from that of a new one: it is never continued.
        content = about.sha256 or about.blob or uuid.uuid4().hex
        identity = f"{about.name}\n{about.size_bytes}\n{content}\n{self._chunk}"
        return _MAGIC + hashlib.sha256(identity.encode("utf-8", "replace")).digest()

    def _read_counters(self) -> tuple[list[int], list[int]]:
        """The counters that an earlier run left: the bytes that are there, and those that were flushed; zeros if they
        are of another file, damaged, or count too much."""
        size = self.located.size_bytes
        number = -(-size // self._chunk)
        fresh = [0] * number, [0] * number
        header = self._header()
        try:
            data = self.counters_path.read_bytes()
            there = self.bytes_path.stat().st_size
        except OSError:
            return fresh
        if len(data) != _ROWS + 2 * _COUNTER.size * number or not data.startswith(header):
            return fresh
        found = [each[0] for each in _COUNTER.iter_unpack(data[_ROWS:])]
        written, flushed = found[::2], found[1::2]
        if data[len(header) : _ROWS] != _this_start() or _this_start() == _NO_START:
            written = flushed
        for chunk, done in enumerate(written):
            start = chunk * self._chunk
            if done > min(self._chunk, size - start) or (done and start + done > there):
                return fresh
        return written, flushed


def _count(counters: int, place: int, n_bytes: int) -> None:
    os.pwrite(counters, _COUNTER.pack(n_bytes), _ROWS + _COUNTER.size * place)


def _this_start() -> bytes:
    """Names the time since the machine was started; zeros if it does not say."""
    try:
        return _START.read_bytes()[:_START_BYTES].ljust(_START_BYTES, b"\0")
    except OSError:
        return _NO_START
