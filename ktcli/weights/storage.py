"""Storage types: how a checkpoint's files store the numbers of tensors, and the interface that a conversion uses.

A *source* is one tensor as a model means it: a name, a shape, numbers. Its bytes may be several tensors of
the files (*parts*: codes, scales, zero points …) under names of their own; which, and what they mean, is its *storage*.
A source is read as rows: [a, b, c, k] is a * b * c rows of k numbers, a vector one row. A *span* is some of these rows;
it lies within one matrix where the last two dimensions are matrices.

`Reader` is a checkpoint of any kind: a folder of safetensors files (`checkpoint.Checkpoint`) or one GGUF
file. Both find sources, read bytes and decode spans, so that the stages after it (`encode`) know neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.native import DType, Format, Numbers, Pool
from ktcli.records import dataclass
from ktcli.weights.header import TensorEntry

STRIP_ELEMENTS = 4 << 20  # large enough to keep many cores busy, small beside any layer

Raw = NDArray[np.uint8]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file."""

    name: str
    file: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a file that are read together: `count` runs of `size_bytes` each, `stride` bytes from the beginning of
    one to that of the next.
    """

    file: str
    offset: int
    size_bytes: int
    count: int = 1
    stride: int = 0

    @property
    def total_bytes(self) -> int:
        """The bytes of all runs."""
        return self.size_bytes * self.count


@dataclass(frozen=True, slots=True)
class StorageSource:
    """One tensor of a checkpoint, with the model's name and shape.

    Attributes:
        shape: the shape of its numbers, which need not be that of a part.
        parts: the tensors of the files that it is made of; the storage says in which order.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """The number of rows: the product of all dimensions but the last."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """The number of columns: the last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def file(self) -> str:
        """The name of the file of its first part."""
        return self.parts[0].file

    @property
    def size_bytes(self) -> int:
        """The bytes of all its parts."""
        return sum(part.entry.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The rows [start, stop) of a source; by default all of it."""

    source: StorageSource
    start: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.source.rows if self.end is None else self.end

    @property
    def rows(self) -> int:
        """The number of rows in the span."""
        return self.stop - self.start


class Storage(Protocol):
    """The interface of one way to store numbers. Hashable and without state: what differs by tensor is in the source.

    The functions get the same span: `reads` says which bytes they want, and the others are given
    these, one array for each `Read`, in order.
    """

    @property
    def label(self) -> str:
        """The name of the storage for people: "bf16", "FP8 (E4M3) in blocks of 128 x 128"."""

    @property
    def lossless(self) -> str | None:
        """The name of the smallest format that holds all its numbers exactly; None: only f32 does."""

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the reads for the bytes of a span. Spans that together are a source want each of its bytes once;
        bytes that many rows share (the scales of a block) may be wanted by each of them.
        """

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the matrix [span.rows, columns] in its stored type where the library reads it, from the bytes of
        `reads`.

        Raises:
            BadCheckpoint: a scale is NaN or Inf, or parts of the source contradict each other.
        """

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns the scales [span.rows, groups of `fmt`] with which `fmt` holds the span exactly; None: there are
        none, or the encoder chooses them well enough by itself.
        """


class NumberChange(Protocol):
    """The interface of a change to the numbers of some of a checkpoint's tensors. Several threads may call it at
    once.
    """

    @property
    def digest(self) -> str:
        """The SHA-256 of all its inputs, hexadecimal."""

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint's tensors that it changes."""

    def apply(self, name: str, start: int, values: Matrix) -> Matrix:
        """Returns the new values of rows [start, start + len(values)) of a tensor, f32; `values` may be changed."""


class Reader(Protocol):
    """An open checkpoint. Its values are not believed: the caller checks them."""

    @property
    def path(self) -> Path:
        """The path of the folder or file, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The object in the `config.json`, as on the hub."""

    @property
    def description(self) -> str:
        """The name of the file or field that lists the tensors, for errors."""

    @property
    def digest(self) -> str:
        """The SHA-256 over the descriptions of the tensors, hexadecimal: it distinguishes checkpoints."""

    @property
    def names(self) -> Collection[str]:
        """The names of all sources; some may be of kinds that `find` refuses."""

    @property
    def change(self) -> NumberChange | None:
        """The change to the numbers; None: they are read as they are stored."""

    def changed(self, change: NumberChange) -> Reader:
        """Returns the same open files with a change to their numbers."""

    def unused(self, taken: Collection[str]) -> list[str]:
        """Returns the names of the parts besides `taken`, without their companions, such as scales."""

    @property
    def small_files(self) -> tuple[str, ...]:
        """The names of the small files that a pack contains, too, sorted; "config.json" is one."""

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StorageSource:
        """Returns the source called `name`.

        Raises:
            BadCheckpoint: it is missing, stored in a way that cannot be read, or not of the expected shape.
        """

    def small_file(self, name: str) -> bytes:
        """Returns the contents of a small file."""

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """Returns the bytes of `wanted`, in the given memory or new one. Several threads may call it at once.

        Raises:
            BadCheckpoint: the file ended early or the disk failed.
        """

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the rows of a span as numbers, as `Storage.numbers` does, with errors that name source and file."""

    def decode(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Matrix:
        """Returns the rows of a span decoded to f32.

        Raises:
            BadCheckpoint: a number is NaN or Inf.
        """

    def refusal(self, source: StorageSource, error: BadCheckpoint) -> BadCheckpoint:
        """Returns `error` about the numbers of a source with the source's name and file added."""

    def close(self) -> None:
        """Closes the files."""


def read_rows(
    source: StorageSource, checkpoint: Reader, pool: Pool
) -> Iterator[tuple[int, Matrix]]:
    """Yields the rows of a source, some at a time, as (index of the first row, values [rows, columns] f32).

    Raises:
        BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
    """
    step = max(STRIP_ELEMENTS // source.columns, 1)
    for start in range(0, source.rows, step):
        span = ByteSpan(source, start, min(start + step, source.rows))
        raws = [checkpoint.read(wanted) for wanted in source.storage.reads(span)]
        yield start, checkpoint.decode(pool, span, raws)


def rows_of(part: Part, row_bytes: int, start: int, stop: int) -> Read:
    """Returns the read of rows [start, stop) of a part whose rows have `row_bytes` bytes."""
    return Read(part.file, part.entry.offset + start * row_bytes, (stop - start) * row_bytes)


class ScalesNotKept:
    """A storage of which no format keeps scales: it has none, or the encoder finds them as well by itself."""

    __slots__ = ()

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns None: there are no scales to keep."""
        return None


class StoredRows(ScalesNotKept):
    """The base of storages of one part, whose rows lie one after the other."""

    __slots__ = ()

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the one read of the span's rows."""
        part = span.source.parts[0]
        row_bytes = part.entry.size_bytes // max(span.source.rows, 1)
        return (rows_of(part, row_bytes, span.start, span.stop),)


@dataclass(frozen=True, slots=True)
class PlainStorage(StoredRows):
    """A storage of plain numbers, without codes or scales; one part."""

    dtype: DType
    lossless: str | None

    @property
    def label(self) -> str:
        """The name of the number type in lower case."""
        return self.dtype.name.lower()

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the span as a matrix of its stored type."""
        return Numbers(self.dtype, raws[0], span.rows, span.source.columns)


@dataclass(frozen=True, slots=True)
class Whole(StoredRows):
    """A storage of whole numbers, rounded where f32 cannot hold them, for a table of experts; one part."""

    dtype: str
    lossless: None = None

    @property
    def label(self) -> str:
        """The name of the integer type."""
        return f"int{8 * np.dtype(self.dtype).itemsize}"

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns the span as a matrix, with the integers converted to f32."""
        found = raws[0].view(self.dtype).reshape(span.rows, span.source.columns)
        return Numbers.of(found.astype(np.float32))


WHOLE: dict[str, Whole] = {"I64": Whole("<i8"), "I32": Whole("<i4")}

PLAIN: dict[str, PlainStorage] = {
    "F32": PlainStorage(DType.F32, None),
    "BF16": PlainStorage(DType.BF16, "bf16"),
    "F16": PlainStorage(DType.F16, None),
}
