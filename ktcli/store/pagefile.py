"""Files of KV pages: the layout of their records, and the checks that a file and each of its records must pass.

    header    magic, version, number of records, namespace, codec, size of the file, checksum of header and table
    table     an entry for each record: its label, where its bytes lie, their checksum
    records   each on a 64-byte boundary: the token ids, the depth of deferral of each, the bytes of the page

A file is written once, under another name, and renamed when it is whole; nothing in it changes afterwards. A record
is a *page*, which holds the last positions of a prefix, or a *state*, which holds what layers keep of the whole prefix
instead. Its key says which prefix, but is never trusted alone: whoever reads a record names its token ids, and they
are compared, as the checksum is, which covers the label as well.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from ktcli.pagelabel import I32Array, PageLabel, U8Array
from ktcli.records import dataclass

MAGIC = b"ktpages\0"
VERSION = 1
KEY_BYTES = 32
MAX_IDS = 64  # of a record: a page has no more positions
MAX_RECORDS = 1 << 16
CODEC_BYTES = 16

# The checksum stands last, and is taken with zero in its place.
_HEADER = struct.Struct("<8sII32s16sQI4x")
_ENTRY = struct.Struct("<32s32sIIIIQQ")
_LABEL = struct.Struct("<32s32sIII")
_ALIGNMENT = 64
_BLOCK = 1 << 20  # of a record that is only checked
_NAME_DIGITS = 24


class Damaged(Exception):
    """Raised when a file or a record differs from what was written; the message completes a sentence about the file."""


class Space(NamedTuple):
    """The identity that a file's pages and their reader must share.

    Attributes:
        namespace: the digest of everything that changes their bytes.
        codec: the name of their layout.
    """

    namespace: bytes
    codec: str


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A record's entry in the table of a file.

    Attributes:
        offset: the first byte of the record: its ids, their depths, then `size_bytes` of data.
        crc: the checksum of label, ids, depths and data.
    """

    kind: int
    key: bytes
    previous: bytes
    end: int
    n_ids: int
    crc: int
    offset: int
    size_bytes: int

    @property
    def head_bytes(self) -> int:
        """The number of bytes that the record's token ids and their depths take, before its data: 5 for each id."""
        return 5 * self.n_ids

    @property
    def whole_bytes(self) -> int:
        """The number of bytes of the whole record: token ids, depths and data."""
        return self.head_bytes + self.size_bytes


class Image:
    """The bytes of a file of pages in preparation.

    Args:
        sizes: the bytes of data of each record to come.
    Attributes:
        bytes: the whole file, once `finish` was called.
        entries: the records so far.
    """

    def __init__(self, space: Space, sizes: Sequence[int]) -> None:
        self._space = space
        room = _aligned(_HEADER.size + _ENTRY.size * len(sizes))
        room += sum(_aligned(5 * MAX_IDS + size) for size in sizes)
        self.bytes: U8Array = np.empty(room, dtype=np.uint8)
        self.entries: list[PageEntry] = []
        self._at = _aligned(_HEADER.size + _ENTRY.size * len(sizes))

    def place(self, label: PageLabel, size_bytes: int) -> U8Array:
        """Returns the memory, uint8 [size_bytes], for the data of the next record, which `add` then makes part of the
        file.
        """
        start = self._at + 5 * len(label.ids)
        return self.bytes[start : start + size_bytes]

    def add(self, label: PageLabel, size_bytes: int) -> None:
        """Adds the next record to the file: writes its label's token ids and depths before the data that were written
        to the memory from `place`, and notes its checksum.
        """
        n = len(label.ids)
        head = label_head(label)
        self.bytes[self._at : self._at + len(head)] = np.frombuffer(head, dtype=np.uint8)
        data = self.bytes[self._at : self._at + len(head) + size_bytes]
        entry = PageEntry(
            label.kind, label.key, label.previous, label.end, n, 0, self._at, size_bytes
        )
        self.entries.append(replace(entry, crc=crc32(data.data, _label_crc(entry))))
        end = _aligned(self._at + data.size)
        self.bytes[self._at + data.size : end] = 0
        self._at = end

    def finish(self) -> tuple[str, U8Array]:
        """Completes the file's header; returns a file name without suffix, derived from the contents, and the bytes of
        the whole file.
        """
        first = self.entries[0].offset if self.entries else _aligned(_HEADER.size)
        head = _head_of(self._space, self.entries, self._at)
        self.bytes[:first] = 0
        self.bytes[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        return sha256(head).hexdigest()[:_NAME_DIGITS], self.bytes[: self._at]

    def alone(self, entry: PageEntry) -> tuple[bytes, U8Array]:
        """Returns the bytes of a file with only this one of the records, in two parts that follow each other: header
        and table, and the record.
        """
        data = self.bytes[entry.offset : _aligned(entry.offset + entry.whole_bytes)]
        head = _head_of(self._space, [replace(entry, offset=ALONE_AT)], ALONE_AT + data.size)
        return head.ljust(ALONE_AT, b"\0"), data


def alone_bytes(n_ids: int, size_bytes: int) -> int:
    """Returns the size in bytes of a page file with one record of `n_ids` token ids and `size_bytes` of data."""
    return ALONE_AT + _aligned(5 * n_ids + size_bytes)


def label_head(label: PageLabel) -> bytes:
    """Returns the bytes that stand before the data of a record: its token ids, little-endian int32, then for each,
    uint8, its depth of deferral (how many experts were computed a layer late).
    """
    ids = np.ascontiguousarray(label.ids, dtype="<i4").tobytes()
    return ids + np.ascontiguousarray(label.depths, dtype=np.uint8).tobytes()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Opens a file or folder for reading; yields its descriptor, and closes it at the end. Symbolic links are not
    followed, and opening a pipe does not block.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_table(path: Path, space: Space | None = None) -> tuple[Space, tuple[PageEntry, ...]]:
    """Returns the space of a file of KV pages (the namespace of the model and the codec of the layout), and the entries
    of its records in the file's table.

    Args:
        space: the space that the file must have; None: any.
    Raises:
        Damaged: it is no such file, incomplete, or of another space.
        OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        return parse_table(lambda n, at: os.pread(descriptor, n, at), size, space)


def parse_table(
    read: Callable[[int, int], bytes], size: int, space: Space | None = None
) -> tuple[Space, tuple[PageEntry, ...]]:
    """Returns the space that the bytes of a file of KV pages give (the namespace of the model and the codec of the
    layout), and the entries of its records in the table.

    Args:
        read: read(n, at) returns n bytes of the file from the offset `at` on, fewer at the end.
        size: the bytes of the whole file.
        space: the space that the file must have; None: any.
    Raises:
        Damaged: the bytes are no such file, incomplete, or of another space.
    """
    head = read(_HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise Damaged("is truncated")
    magic, version, n, namespace, codec, whole, crc = _HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise Damaged("has an unsupported page file version")
    if whole != size:
        raise Damaged(f"has {size} bytes, not {whole}")
    table_bytes = n * _ENTRY.size
    if n > MAX_RECORDS or _HEADER.size + table_bytes > size:
        raise Damaged("has a damaged header")
    table = read(table_bytes, _HEADER.size)
    blank = _HEADER.pack(magic, version, n, namespace, codec, whole, 0)
    if len(table) != table_bytes or crc32(table, crc32(blank)) != crc or head[-4:] != bytes(4):
        raise Damaged("has a damaged header")
    there = Space(namespace, codec.rstrip(b"\0").decode("ascii", "replace"))
    if space is not None and there != space:
        raise Damaged("contains pages of another model or layout")
    entries = tuple(_entry(fields) for fields in _ENTRY.iter_unpack(table))
    end = _HEADER.size + table_bytes
    for entry in entries:  # they lie in order: no more is read of a file than it has
        if entry.n_ids > MAX_IDS or entry.offset < end or entry.offset + entry.whole_bytes > size:
            raise Damaged("has a damaged header")
        end = entry.offset + entry.whole_bytes
    return there, entries


def read_record(descriptor: int, entry: PageEntry, label: PageLabel, data: U8Array) -> None:
    """Reads the data of a record of an open page file into `data`, uint8 [size_bytes], and checks that they belong to
    `label`.

    Raises:
        Damaged: the record is damaged or of another label; the contents of `data` are then undefined.
        OSError: the record cannot be read.
    """
    require_label(entry, label, data.size)
    head = np.empty(entry.head_bytes, dtype=np.uint8)
    if _read_all(descriptor, (head, data), entry.offset) != entry.whole_bytes:
        raise Damaged("is truncated")
    require_bytes(entry, label, head, data)


def require_label(entry: PageEntry, label: PageLabel, size_bytes: int) -> None:
    """Checks that a record's table entry has the prefix of `label` and `size_bytes` of data.

    Raises:
        Damaged: the entry has another prefix or size.
    """
    wanted = (label.kind, label.key, label.previous, label.end, len(label.ids))
    if wanted != (entry.kind, entry.key, entry.previous, entry.end, entry.n_ids):
        raise Damaged("contains a page of another prefix")
    if entry.size_bytes != size_bytes:
        raise Damaged(f"contains a page of {entry.size_bytes} bytes, not {size_bytes}")


def require_bytes(entry: PageEntry, label: PageLabel, head: U8Array, data: U8Array) -> None:
    """Checks that the bytes of a record match its checksum and the token ids and depths of `label`.

    Args:
        head: the record's ids and depths, [head_bytes].
    Raises:
        Damaged: they do not match.
    """
    if crc32(data.data, crc32(head.data, _label_crc(entry))) != entry.crc:
        raise Damaged("has a checksum mismatch")
    if head.tobytes() != label_head(label):
        raise Damaged("contains a page of different tokens")


def read_ids(path: Path, entry: PageEntry) -> tuple[I32Array, U8Array]:
    """Returns, without checking them, the token ids of a record of a page file, int32 [n_ids], and for each the depth
    of deferral with which it was computed, uint8 [n_ids].

    Raises:
        Damaged: the file is too short. OSError: it cannot be read.
    """
    with opened(path) as descriptor:
        head = os.pread(descriptor, entry.head_bytes, entry.offset)
    if len(head) != entry.head_bytes:
        raise Damaged("is truncated")
    n = entry.n_ids
    return np.frombuffer(head, "<i4", n).astype(np.int32), np.frombuffer(head, np.uint8, n, 4 * n)


def check_record(descriptor: int, entry: PageEntry) -> None:
    """Checks that the bytes of a record of an open page file match its checksum.

    Raises:
        Damaged: they do not match. OSError: the record cannot be read.
    """
    crc, at, end = _label_crc(entry), entry.offset, entry.offset + entry.whole_bytes
    while at < end:
        block = os.pread(descriptor, min(_BLOCK, end - at), at)
        if not block:
            raise Damaged("is truncated")
        crc, at = crc32(block, crc), at + len(block)
    if crc != entry.crc:
        raise Damaged("has a checksum mismatch")


def _read_all(descriptor: int, parts: Iterable[U8Array], offset: int) -> int:
    """Reads into the parts, one behind the other; returns the bytes read, fewer at the end of the file."""
    done, views = 0, [part.data for part in parts if part.size]
    while views:
        n = os.preadv(descriptor, views, offset + done)
        if n == 0:
            break
        done += n
        while views and n >= len(views[0]):
            n -= len(views.pop(0))
        if views and n:
            views[0] = views[0][n:]
    return done


def _head(space: Space, records: int, size: int, crc: int) -> bytes:
    codec = space.codec.encode("ascii")
    assert len(codec) <= CODEC_BYTES and len(space.namespace) == KEY_BYTES
    return _HEADER.pack(MAGIC, VERSION, records, space.namespace, codec, size, crc)


def _head_of(space: Space, entries: Sequence[PageEntry], size: int) -> bytes:
    """The header and the table of a file, with their checksum."""
    table = b"".join(_packed(entry) for entry in entries)
    crc = crc32(table, crc32(_head(space, len(entries), size, 0)))
    return _head(space, len(entries), size, crc) + table


def _packed(entry: PageEntry) -> bytes:
    facts = entry.kind, entry.end, entry.n_ids, entry.crc, entry.offset, entry.size_bytes
    return _ENTRY.pack(entry.key, entry.previous, *facts)


def _entry(fields: tuple[bytes, bytes, int, int, int, int, int, int]) -> PageEntry:
    key, previous, kind, end, n_ids, crc, offset, size_bytes = fields
    return PageEntry(kind, key, previous, end, n_ids, crc, offset, size_bytes)


def _label_crc(entry: PageEntry) -> int:
    return crc32(_LABEL.pack(entry.key, entry.previous, entry.kind, entry.end, entry.n_ids))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


ALONE_AT = _aligned(_HEADER.size + _ENTRY.size)  # where the record of a file with one record begins
