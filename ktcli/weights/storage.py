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
        """The bytes of all runs that are read together."""
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
        """The number of the tensor's rows: the product of all dimensions but the last."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """The number of the tensor's columns: its last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def file(self) -> str:
        """The name of the checkpoint file that holds the first of the tensor's parts (codes, scales …)."""
        return self.parts[0].file

    @property
    def size_bytes(self) -> int:
        """The total bytes of the tensor's parts (codes, scales …) in the checkpoint."""
        return sum(part.entry.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The rows [start, stop) of a source; by default all of it."""

    source: StorageSource
    start: int = 0
    end: int | None = None

    @property
    def stop(self) -> int:
        """The number of the row after the span's last one."""
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
        """The name of this way of storing numbers, for people: "bf16", "FP8 (E4M3) in blocks of 128 x 128"."""

    @property
    def lossless(self) -> str | None:
        """The name of the smallest of kt's formats that holds all numbers stored in this way exactly; None: only f32
        does."""

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of a tensor, one or more for each of its
        parts. Bytes that many rows share (the scale of a block) are part of the ranges of each span that needs them."""

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor, [rows, columns], in their stored type where the library
        reads it, from `raws`, the bytes of the ranges that `reads` returns.

        Raises:
            BadCheckpoint: a scale is NaN or Inf, or parts of the source contradict each other.
        """

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns the stored scales with which `fmt` holds the rows of the span exactly, one for each group of columns
        of `fmt`, f32 [span.rows, groups]; None: no such scales are stored, or the encoder finds as good ones by itself.
        """


class NumberChange(Protocol):
    """The interface of a change to the numbers of some of a checkpoint's tensors. Several threads may call it at
    once.
    """

    @property
    def digest(self) -> str:
        """The SHA-256, hexadecimal, of everything that determines the change."""

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint's tensors whose numbers change."""

    def apply(self, name: str, start: int, values: Matrix) -> Matrix:
        """Returns the changed rows [start, start + len(values)) of the tensor `name`, [rows, columns] f32, from the
        rows `values` as they are stored; `values` may be overwritten."""


class Reader(Protocol):
    """An open checkpoint. Its values are not believed: the caller checks them."""

    @property
    def path(self) -> Path:
        """The path of the checkpoint, a folder or a file, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The object in the checkpoint's `config.json`, as on the hub."""

    @property
    def description(self) -> str:
        """The name, for errors, of the file or field that says which tensors the checkpoint must have."""

    @property
    def digest(self) -> str:
        """The SHA-256, hexadecimal, over the headers of the checkpoint's files: it distinguishes checkpoints."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors that can be asked for in the checkpoint; some may be of kinds that `find`
        refuses."""

    @property
    def change(self) -> NumberChange | None:
        """The change that is made to the checkpoint's numbers as they are read; None: they are read as they are
        stored."""

    def changed(self, change: NumberChange) -> Reader:
        """Returns a reader of the same open files whose numbers are changed by `change` as they are read."""

    def unused(self, taken: Collection[str]) -> list[str]:
        """Returns the names of the checkpoint's tensors that are not in `taken`, without those that merely accompany
        others, such as scales."""

    @property
    def small_files(self) -> tuple[str, ...]:
        """The names of the small files of the checkpoint (config, tokenizer …) that a pack also contains, with
        "config.json"; sorted."""

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> StorageSource:
        """Returns the checkpoint tensor called `name`: its shape and where and how its numbers are stored.

        Raises:
            BadCheckpoint: it is missing, stored in a way that cannot be read, or not of the expected shape.
        """

    def small_file(self, name: str) -> bytes:
        """Returns the contents of the small file `name` of the checkpoint."""

    def read(self, wanted: Read, into: Raw | None = None) -> Raw:
        """Returns the bytes of the ranges `wanted` of a file, uint8, one range after the other: in the memory `into`,
        or in new memory. Several threads may call it at once.

        Raises:
            BadCheckpoint: the file ended early or the disk failed.
        """

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor in their stored number type, as `Storage.numbers` does, with
        errors that name the tensor and its file."""

    def decode(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Matrix:
        """Returns rows [span.start, span.stop) of a tensor decoded to f32, [rows, columns], from `raws`, the bytes of
        the ranges that its storage reads for the span.

        Raises:
            BadCheckpoint: a number is NaN or Inf.
        """

    def refusal(self, source: StorageSource, error: BadCheckpoint) -> BadCheckpoint:
        """Returns a new error like `error`, about bad numbers of a tensor, whose message names the tensor and its
        file."""

    def close(self) -> None:
        """Closes the files of the checkpoint."""


def read_rows(
    source: StorageSource, checkpoint: Reader, pool: Pool
) -> Iterator[tuple[int, Matrix]]:
    """Yields all rows of a checkpoint tensor, some at a time, as (number of the first row, values [rows, columns] f32).

    Raises:
        BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
    """
    step = max(STRIP_ELEMENTS // source.columns, 1)
    for start in range(0, source.rows, step):
        span = ByteSpan(source, start, min(start + step, source.rows))
        raws = [checkpoint.read(wanted) for wanted in source.storage.reads(span)]
        yield start, checkpoint.decode(pool, span, raws)


def rows_of(part: Part, row_bytes: int, start: int, stop: int) -> Read:
    """Returns the byte range to read for rows [start, stop) of `part`, a tensor of a file whose rows have `row_bytes`
    bytes."""
    return Read(part.file, part.entry.offset + start * row_bytes, (stop - start) * row_bytes)


class ScalesNotKept:
    """A storage of which no format keeps scales: it has none, or the encoder finds them as well by itself."""

    __slots__ = ()

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns None: this way of storing numbers has no scales that a format could keep."""
        return None


class StoredRows(ScalesNotKept):
    """The base of storages of one part, whose rows lie one after the other."""

    __slots__ = ()

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the one byte range to read for rows [span.start, span.stop) of a tensor."""
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
        """The name of the number type in lower case, such as "bf16"."""
        return self.dtype.name.lower()

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor, [rows, columns], in their stored type, from `raws`, the
        bytes of these rows."""
        return Numbers(self.dtype, raws[0], span.rows, span.source.columns)


@dataclass(frozen=True, slots=True)
class Whole(StoredRows):
    """A storage of whole numbers, rounded where f32 cannot hold them, for a table of experts; one part."""

    dtype: str
    lossless: None = None

    @property
    def label(self) -> str:
        """The name of the integer type: "int32" or "int64"."""
        return f"int{8 * np.dtype(self.dtype).itemsize}"

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor of integers, [rows, columns], converted to f32, from `raws`,
        the bytes of these rows."""
        found = raws[0].view(self.dtype).reshape(span.rows, span.source.columns)
        return Numbers.of(found.astype(np.float32))


WHOLE: dict[str, Whole] = {"I64": Whole("<i8"), "I32": Whole("<i4")}

PLAIN: dict[str, PlainStorage] = {
    "F32": PlainStorage(DType.F32, None),
    "BF16": PlainStorage(DType.BF16, "bf16"),
    "F16": PlainStorage(DType.F16, None),
}
