"""The header of a GGUF file, read as hostile input.

A file is: "GGUF", u32 version, u64 tensors, u64 keys; the keys (text, u32 type, value); the tensors (text,
u32 dimensions, u64 each, fastest first, u32 type, u64 offset); padding to the alignment; data. A text is a u64
length and UTF-8. All little-endian. Source: ggml's docs/gguf.md, versions 2 and 3.

The `gguf` package has a reader too; it believes counts and lengths, makes several arrays of each element and
recurses into nested ones, so it is asked only for the names of types and the sizes of their blocks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ktcli import ggufname
from ktcli.errors import BadCheckpoint
from ktcli.numbered import numbered_set
from ktcli.records import dataclass
from ktcli.weights.header import MAX_TENSORS, TensorEntry, is_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64_000_000  # a vocabulary of 200 000 tokens with its merges takes 12 MB
MAX_KEYS = 10_000  # published ones have about 50
MAX_KEY_BYTES = 1_000
MAX_ELEMENTS = 2_000_000  # in all arrays; the largest vocabularies with merges have 1.3 million
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
_BLOCK = 1 << 20  # bytes read at once

_TEXT, _ARRAY, _BOOL = 8, 9, 7
# Type of a value -> its struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a GGUF header.

    Attributes:
        values: the metadata by key: a number, text, flag, or list of one kind of them.
        entries: tensors by name; shapes slowest dimension first, dtype the name of a ggml type.
        digest: SHA-256 of the header's bytes.
    """

    values: dict[str, Any]
    entries: dict[str, TensorEntry]
    digest: str


def is_gguf(path: Path) -> bool:
    """Returns whether the name of the file at `path` is that of a GGUF file: "….gguf", or "sha256-…" as in Ollama's
    store; the file is not read."""
    return ggufname.is_gguf(path.name)


def gguf_at(path: Path) -> Path | None:
    """Returns the path of the GGUF file at `path`: `path` itself or, if it is a folder, the first file of the only GGUF
    model in it or else in its subfolders; None: there are none or several, or the folder has a config.json."""
    if is_gguf(path):
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("[!.]*.gguf")) or sorted(path.glob("[!.]*/[!.]*.gguf"))
    sets = {numbered_set(file.name)[0] for file in files}
    return files[0] if len(sets) == 1 else None


def read_gguf_header(path: Path) -> GgufHeader:
    """Returns the header of the GGUF file at `path`: its metadata, tensors and hash, with every count and range checked
    against the size of the file.

    Raises:
        BadCheckpoint: anything about the header is wrong; the message names the file and the values.
    """
    if not is_regular(path):
        raise BadCheckpoint(f"{path.name} is missing or is not a plain file in {path.parent}")
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return _scan(_Reader(file, size))
        except _GgufFault as fault:
            raise BadCheckpoint(f"the header of {path.name} is damaged: {fault}") from None
        except OSError as error:
            raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}") from None


class _GgufFault(Exception):
    """A fault in a header, without the file's name."""


class _Reader:
    """A reader of a file from its start; it keeps no more in memory than the requested bytes and a block."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size = file, size
        self._bytes, self._first, self.at = b"", 0, 0
        self._seen = sha256()
        self.elements = 0

    def digest(self) -> str:
        """The SHA-256 of the bytes that were taken."""
        self._keep()
        return self._seen.hexdigest()

    def _keep(self) -> bytes:
        """Drops the bytes that were taken from memory and returns the rest."""
        self._seen.update(self._bytes[: self.at - self._first])
        self._bytes, self._first = self._bytes[self.at - self._first :], self.at
        return self._bytes

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes."""
        end = self.at + count
        if end > min(self.size, MAX_HEADER_BYTES):
            limit = "the file" if end > self.size else "the limit"
            raise _GgufFault(
                f"{count} bytes at {self.at} extend beyond {limit} ({min(self.size, MAX_HEADER_BYTES)})"
            )
        if end > self._first + len(self._bytes):
            kept = self._keep()
            self._bytes = kept + (self._file.read(max(count - len(kept), _BLOCK)) or b"")
            if len(self._bytes) < count:
                raise _GgufFault(f"it became shorter while it was read, at {self.at}")
        start, self.at = self.at - self._first, end
        return self._bytes[start : start + count]

    def number(self, code: str) -> Any:
        """Reads one scalar by its struct code."""
        layout = struct.Struct(f"<{code}")
        return layout.unpack(self.take(layout.size))[0]

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        """Reads a text of at most `limit` bytes."""
        length = self.number("Q")
        if length > limit:
            raise _GgufFault(f"{what} has {length} bytes; the limit is {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise _GgufFault(f"{what} at {self.at - length} is not UTF-8 text") from None


def _scan(r: _Reader) -> GgufHeader:
    if r.size < 24:
        raise _GgufFault(f"it has only {r.size} bytes")
    if (magic := r.take(4)) != MAGIC:
        raise _GgufFault(f"it begins with {magic!r}, not {MAGIC!r}, so it is not a GGUF file")
    version = r.number("I")
    if version not in VERSIONS:
        big = version.to_bytes(4, "little") in [v.to_bytes(4, "big") for v in VERSIONS]
        why = "is big-endian" if big else f"has version {version}"
        raise _GgufFault(f"it {why}; kt reads little-endian files of version 2 and 3")
    tensors, keys = r.number("Q"), r.number("Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise _GgufFault(
            f"it lists {tensors} tensors and {keys} keys; the limits are {MAX_TENSORS} and {MAX_KEYS}"
        )
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = r.text("a key", MAX_KEY_BYTES)
        if key in values:
            raise _GgufFault(f"key {key!r} occurs twice")
        values[key] = _value(r, key)
    infos = [_info(r) for _ in range(tensors)]
    size = r.at
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(alignment) is not int
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise _GgufFault(f"general.alignment is {str(alignment)[:40]}, not a power of two")
    start = -(-size // alignment) * alignment
    return GgufHeader(values, _entries(infos, start, alignment, r), r.digest())


def _value(r: _Reader, key: str) -> Any:
    kind = r.number("I")
    if kind == _TEXT:
        return r.text(key)
    if kind in _SCALARS:
        return _flag(r, key) if kind == _BOOL else r.number(_SCALARS[kind])
    if kind != _ARRAY:
        raise _GgufFault(f"{key!r} has the unknown type {kind}")
    kind, count = r.number("I"), r.number("Q")
    r.elements += count
    if r.elements > MAX_ELEMENTS:
        raise _GgufFault(
            f"{key!r} has {count} elements; the limit for all arrays is {MAX_ELEMENTS}"
        )
    if kind == _TEXT:
        return [r.text(key) for _ in range(count)]
    if kind == _BOOL:
        return [_flag(r, key) for _ in range(count)]
    if kind not in _SCALARS:
        raise _GgufFault(
            f"{key!r} is an array of type {kind}; kt reads arrays of numbers and strings"
        )
    layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
    return list(layout.unpack(r.take(layout.size)))


def _flag(r: _Reader, key: str) -> bool:
    byte = r.take(1)[0]
    if byte > 1:
        raise _GgufFault(f"{key!r} is a boolean with the value {byte}")
    return byte == 1


_Info = tuple[str, tuple[int, ...], int, int]  # name, shape, type, offset in the data


def _info(r: _Reader) -> _Info:
    name = r.text("the name of a tensor", MAX_KEY_BYTES)
    count = r.number("I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise _GgufFault(
            f"tensor {name!r} has {count} dimensions; kt supports 1 to {MAX_DIMENSIONS}"
        )
    shape = tuple(r.number("Q") for _ in range(count))[::-1]
    if 0 in shape or prod(shape) >= 1 << 60:
        raise _GgufFault(f"tensor {name!r} has the shape {list(shape)}")
    return name, shape, r.number("I"), r.number("Q")


def _entries(infos: list[_Info], start: int, alignment: int, r: _Reader) -> dict[str, TensorEntry]:
    """Tensors by name; the data begins at `start`."""
    size_of = _sizes()
    entries: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in infos:
        if name in entries:
            raise _GgufFault(f"tensor {name!r} occurs twice")
        dtype, size = size_of(name, shape, kind)
        if offset % alignment or start + offset + size > r.size:
            raise _GgufFault(
                f"tensor {name!r} of {size} bytes at {offset} of the data is not inside the file "
                f"({r.size - start} bytes of data, alignment {alignment})"
            )
        entries[name] = TensorEntry(dtype, shape, start + offset, size)
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise _GgufFault(f"tensor {name!r} overlaps {before!r}")
        end, before = entry.offset + entry.size_bytes, name
    return entries


def _sizes() -> Callable[[str, tuple[int, ...], int], tuple[str, int]]:
    """Returns a function that maps a tensor's (name, shape, type) to the name of its type and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES

    known = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}

    def size_of(name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        if kind not in known:
            raise _GgufFault(f"tensor {name!r} has the unknown type {kind}")
        dtype, elements, size_bytes = known[kind]
        if shape[-1] % elements:
            raise _GgufFault(
                f"tensor {name!r} is {dtype} with rows of {shape[-1]}, which is not a multiple of {elements}"
            )
        return dtype, prod(shape) // elements * size_bytes

    return size_of
