"""The header of a safetensors file, read as hostile input, and written by our own rules.

A file is: u64 little-endian N, N bytes of JSON, data. The JSON maps names to dtype, shape and byte range
in the data; `__metadata__` maps strings to strings. Nothing is allocated before it was compared with the
size of the file, no number is trusted before it was compared with its neighbours, and the JSON is scanned
by patterns that know only this grammar: nothing nests, so nothing can recurse or multiply in memory.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from math import prod
from pathlib import Path
from typing import BinaryIO

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass

ALIGNMENT = 64  # bytes, of the data in files we write: a cache line, and what kernels load from
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_TENSORS = 300_000  # tensors of one model; the largest ones have 200 000

# Bits per element. A file may also hold types that `checkpoint` does not read.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def elements(self) -> int:
        """The number of the tensor's elements: the product of its dimensions."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a safetensors header.

    Attributes:
        entries: the tensors by name, in the order of their data.
        raw: the JSON as it stands in the file, for hashing.
    """

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    raw: bytes


def is_regular(path: Path) -> bool:
    """Returns whether `path` is a regular file after following links, not a folder, pipe or device."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bounded(path: Path, limit: int) -> bytes:
    """Returns the whole contents of the file at `path`, which may have at most `limit` bytes.

    Raises:
        BadCheckpoint: the file is missing, not a plain file, larger than `limit` bytes, or cannot be read.
    """
    if not is_regular(path):
        raise BadCheckpoint(f"{path.name} is missing or is not a plain file in {path.parent}")
    try:
        return smallfiles.read_bounded(path, limit)
    except OSError as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error


def read_header(path: Path, size_bytes: int | None = None) -> Header:
    """Returns the header of the safetensors file at `path`: its tensors and metadata, every range checked against the
    file's size.

    Args:
        size_bytes: the size of the whole file, where only its beginning is on the disk; None: all of it is.
    Raises:
        BadCheckpoint: anything about the header is wrong; the message names the file and the values.
    """
    if not is_regular(path):
        raise BadCheckpoint(f"{path.name} is missing or is not a plain file in {path.parent}")
    try:
        with path.open("rb") as file:
            here = os.fstat(file.fileno()).st_size
            size = here if size_bytes is None else size_bytes
            raw = _read(file, path.name, here, size)
    except OSError as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadCheckpoint(f"the header of {path.name} is not UTF-8 text") from None
    try:
        entries, metadata = _scan(text)
        _check_ranges(entries, size - 8 - len(raw))
    except _HeaderFault as fault:
        raise BadCheckpoint(f"the header of {path.name} is damaged: {fault}") from None
    start = 8 + len(raw)
    return Header(
        {
            n: TensorEntry(e.dtype, e.shape, e.offset + start, e.size_bytes)
            for n, e in entries.items()
        },
        metadata,
        raw,
    )


def _read(file: BinaryIO, name: str, here: int, size: int) -> bytes:
    """Returns the JSON of the header of a file of `size` bytes, of which `here` are on the disk."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise BadCheckpoint(f"{name} has only {here} bytes and is not a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"{name} claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}"
        )
    if length > min(size, here) - 8:
        raise BadCheckpoint(
            f"{name} is truncated: its header has {length} bytes, the file {min(size, here)}"
        )
    return file.read(length)


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Returns the bytes of a safetensors header (length and JSON) for a file with `tensors` (name to dtype and shape)
    in this order, without gaps.

    It is padded with spaces so that the tensor data begins at a multiple of 64 bytes.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _HeaderFault(Exception):
    """A fault in a header, without the file's name."""


_S = r"[ \t\n\r]*"  # white space of JSON
_FIELD = rf'{_S}"(dtype|shape|data_offsets)"{_S}:{_S}("[A-Z0-9_]{{1,16}}"|\[[0-9, \t\n\r]{{0,400}}\]){_S}'
# Names hold no escapes: no tensor is called that.
_ENTRY = re.compile(rf'"([^"\\\x00-\x1f]{{1,1000}})"{_S}:{_S}\{{{_FIELD},{_FIELD},{_FIELD}\}}{_S}')
_METADATA = re.compile(rf'"__metadata__"{_S}:{_S}\{{{_S}')
_NUMBERS = re.compile(rf"\[{_S}(?:[0-9]{{1,20}}(?:{_S},{_S}[0-9]{{1,20}}){{0,7}})?{_S}\]")
_SPACE = re.compile(_S)


def _scan(text: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The entries with offsets as written (relative to the data), and the metadata."""
    entries: dict[str, TensorEntry] = {}
    metadata: dict[str, str] | None = None
    at = _after(text, 0, "{")
    while text[at : at + 1] != "}":
        if entries or metadata is not None:
            at = _after(text, at, ",")
        if found := _METADATA.match(text, at):
            if metadata is not None:
                raise _HeaderFault("__metadata__ occurs twice")
            metadata, at = _scan_metadata(text, found.end())
        elif found := _ENTRY.match(text, at):
            name = found[1]
            if name in entries:
                raise _HeaderFault(f"tensor {name!r} occurs twice")
            if len(entries) >= MAX_TENSORS:
                raise _HeaderFault(f"it lists more than {MAX_TENSORS} tensors")
            words = found.groups()
            entries[name] = _entry(name, dict(zip(words[1::2], words[2::2], strict=True)))
            at = found.end()
        else:
            raise _HeaderFault(f"no tensor can be read at byte {at}")
    if _end_of_space(text, at + 1) != len(text):
        raise _HeaderFault("something follows its last brace")
    return entries, metadata or {}


def _after(text: str, at: int, mark: str) -> int:
    """The index of the next item behind `mark`, which must stand at `at` but for white space."""
    at = _end_of_space(text, at)
    if text[at : at + 1] != mark:
        raise _HeaderFault(f"{mark!r} is missing at byte {at}")
    return _end_of_space(text, at + 1)


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _scan_metadata(text: str, at: int) -> tuple[dict[str, str], int]:
    """The strings of `__metadata__`, whose first key or closing brace is at `at`."""
    strings: dict[str, str] = {}
    while text[at : at + 1] != "}":
        if strings:
            at = _after(text, at, ",")
        key, at = _string(text, at)
        value, at = _string(text, _after(text, at, ":"))
        if key in strings:
            raise _HeaderFault(f"metadata {key[:100]!r} occurs twice")
        strings[key] = value
        at = _end_of_space(text, at)
    return strings, _end_of_space(text, at + 1)


def _string(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise _HeaderFault(f"a string is missing at byte {at}")
    try:
        value, end = scanstring(text, at + 1, True)
    except ValueError:
        raise _HeaderFault(f"the string at byte {at} is not valid") from None
    return str(value), int(end)


def _entry(name: str, fields: dict[str, str]) -> TensorEntry:
    if len(fields) != 3:
        raise _HeaderFault(f"tensor {name!r} has a field twice")
    dtype = fields["dtype"].strip('"')
    if dtype not in DTYPE_BITS or not fields["dtype"].startswith('"'):
        raise _HeaderFault(f"tensor {name!r} has the unknown type {dtype}")
    shape, span = (_numbers(name, fields[key]) for key in ("shape", "data_offsets"))
    if len(span) != 2 or span[0] > span[1]:
        raise _HeaderFault(f"tensor {name!r} has the byte range {list(span)}")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (span[1] - span[0]):
        size = span[1] - span[0]
        raise _HeaderFault(
            f"tensor {name!r} is {dtype} {list(shape)}, which is not the {size} bytes of its range"
        )
    return TensorEntry(dtype, shape, span[0], span[1] - span[0])


def _numbers(name: str, text: str) -> tuple[int, ...]:
    if _NUMBERS.fullmatch(text) is None:
        raise _HeaderFault(f"tensor {name!r} has {text[:60]!r} instead of at most 8 whole numbers")
    return tuple(map(int, text[1:-1].split(","))) if text[1:-1].strip() else ()


def _check_ranges(entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Sorts the entries by offset, in place; the ranges must follow each other without gap or overlap to the end."""
    ordered = sorted(entries.items(), key=lambda item: (item[1].offset, item[1].size_bytes))
    end = 0
    for name, entry in ordered:
        if entry.offset != end:
            what = "overlaps the one before it" if entry.offset < end else "leaves a gap before it"
            raise _HeaderFault(f"tensor {name!r} at {entry.offset} {what}, which ends at {end}")
        end += entry.size_bytes
    if end != data_bytes:
        what = "truncated" if end > data_bytes else "followed by something else"
        raise _HeaderFault(f"the data is {what}: it should have {end} bytes, but has {data_bytes}")
    entries.clear()
    entries.update(ordered)
