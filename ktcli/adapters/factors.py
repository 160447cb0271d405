"""The factors A and B of an adapter in its files, in any layout, and their values.

peft packs the A of all experts below each other and their B in turn: of B [out, r * E], column ρ * E + e is column ρ of
expert e. Reading B as A is packed gives another adapter that looks as plausible.
"""

from __future__ import annotations

from enum import Enum
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass
from ktcli.weights.files import OpenFiles
from ktcli.weights.storage import Part, Raw, Read

F32 = NDArray[np.float32]

_ROUNDED = 1 << 16  # numbers that are rounded at a time

# The types that a factor may have, each with that of its bytes in numpy.
FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class FactorPacking(Enum):
    """The place of each matrix in the tensors of a factor [count, rows, columns]."""

    EACH = "each"  # a tensor [rows, columns] for each
    STACKED = "stacked"  # one [count, rows, columns]
    BELOW = "below"  # one [count * rows, columns]: row e * rows + i
    IN_TURN = "in turn"  # one [rows, columns * count]: column j * count + e


@dataclass(frozen=True, slots=True)
class Factor:
    """A or B of one target.

    Attributes:
        parts: its tensors in the files, one for each matrix or one for all.
        shape: (count, rows, columns) of the values.
        flipped: whether each matrix lies transposed, [columns, rows] in what `packing` says.
    """

    parts: tuple[Part, ...]
    packing: FactorPacking
    shape: tuple[int, int, int]
    flipped: bool = False

    @property
    def dtype(self) -> str:
        """The number type of the factor's tensors in the files: "F32", "F16" or "BF16"; "F32" if they have several
        types.
        """
        found = {part.entry.dtype for part in self.parts}
        return found.pop() if len(found) == 1 else "F32"

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the factor's tensors take in the files."""
        return sum(part.entry.size_bytes for part in self.parts)

    def values(self, files: OpenFiles) -> F32:
        """Returns the factor's matrices, [count, rows, columns] f32, read from the files; no number is rounded.

        Raises:
            BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
        """
        found = [decoded(part, files) for part in self.parts]
        return self._shaped(found[0] if len(found) == 1 else np.concatenate(found))

    def stored(self, files: OpenFiles, room: Raw) -> NDArray[Any]:
        """Returns the factor's matrices, [count, rows, columns], in the number type of the files: float32, float16, or
        uint16 with the bits of bf16. They are not checked for NaN and Inf, except where the tensors have several types
        and are read as f32.

        Args:
            room: at least `size_bytes` bytes, into which tensors of one type are read; the result is then a view of it.
        Raises:
            BadCheckpoint: a file cannot be read, or tensors of several types have a NaN or Inf.
        """
        if len({part.entry.dtype for part in self.parts}) > 1:
            return self.values(files)
        at = 0
        for part in self.parts:
            size = part.entry.size_bytes
            files.read(Read(part.file, part.entry.offset, size), room[at : at + size])
            at += size
        return self._shaped(room[:at].view(FLOATS[self.dtype]))

    def _shaped(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The numbers of all parts, one behind the other, as a view [count, rows, columns]."""
        count, rows, columns = self.shape
        if self.flipped:
            rows, columns = columns, rows
        if self.packing is FactorPacking.IN_TURN:
            made = numbers.reshape(rows, columns, count).transpose(2, 0, 1)
        else:
            made = numbers.reshape(count, rows, columns)
        return made.swapaxes(1, 2) if self.flipped else made


def decoded(part: Part, files: OpenFiles) -> F32:
    """Returns the numbers of one tensor in an adapter's file as a flat f32 array; no number is rounded.

    Raises:
        BadCheckpoint: a number is NaN or Inf, or the file cannot be read.
    """
    entry = part.entry
    raw = files.read(Read(part.file, entry.offset, entry.size_bytes)).view(FLOATS[entry.dtype])
    if entry.dtype == "BF16":
        found: F32 = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        found = raw.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise BadCheckpoint(
            f"{part.name} in {part.file} contains NaN or Inf",
            hint="the training diverged: use an earlier checkpoint of it",
        )
    return found


def encoded(values: F32, dtype: str) -> bytes:
    """Returns the little-endian bytes of an array's numbers in the type `dtype` ("F32", "F16" or "BF16"), rounded to
    nearest even where the type cannot hold them exactly.
    """
    flat: F32 = np.ascontiguousarray(values, np.float32).reshape(-1)
    if dtype == "BF16":
        return as_bf16(flat).astype("<u2", copy=False).tobytes()
    return flat.astype(FLOATS[dtype]).tobytes()


def as_bf16(values: F32) -> NDArray[np.uint16]:
    """Returns the bits of the numbers in bf16, rounded to nearest even: uint16, in the shape of `values`."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    made = np.empty(bits.size, np.uint16)
    room = np.empty(min(bits.size, _ROUNDED), np.uint32)
    for first in range(0, bits.size, _ROUNDED):
        some = bits[first : first + _ROUNDED]
        rounded = room[: some.size]
        np.right_shift(some, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += some
        rounded >>= 16
        made[first : first + _ROUNDED] = rounded
    return made.reshape(np.shape(values))


def hash_of(path: Path) -> str:
    """Returns the SHA-256 of a file, hexadecimal.

    Raises:
        BadCheckpoint: the file cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            return file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}") from error
