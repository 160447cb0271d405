"""Decodes the number types of GGUF files: the common ones with the library (blocks.c), the rest with the `gguf`
package, which knows all of them and uses one core.

Tensors that converters rearrange are read through a `TensorView`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.native import BadNumber, DType, Format, Numbers, Pool, Scale
from ktcli.records import dataclass
from ktcli.weights.formats import LINEAR
from ktcli.weights.storage import (
    PLAIN,
    WHOLE,
    ByteSpan,
    Matrix,
    PlainStorage,
    Raw,
    Read,
    ScalesNotKept,
    Storage,
    StoredRows,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class HalfScales(PlainStorage):
    """A storage of blocks that begin with an f16 scale and hold codes -8..7: 4 bits and f32 scales hold them
    exactly."""

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns the scales of the blocks in the rows of a span, [rows, blocks] f32, if `fmt` holds their codes
        exactly (4 bits, linear, f32 scales, groups as long as a block); otherwise None."""
        elements, size = self.dtype.block
        if (fmt.bits, fmt.group, fmt.scale, fmt.codebook) != (4, elements, Scale.F32, LINEAR):
            return None
        halves = np.ascontiguousarray(raws[0].reshape(-1, size)[:, :2]).view("<f2")
        return halves.astype(np.float32).reshape(span.rows, -1)


@dataclass(frozen=True, slots=True)
class Packaged(StoredRows):
    """A storage of blocks that the `gguf` package decodes; one part."""

    dtype: str
    lossless: None = None

    @property
    def label(self) -> str:
        """The name of the GGUF number type, such as "IQ4_XS"."""
        return self.dtype

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of a tensor as an f32 matrix, dequantized by the `gguf` package from
        `raws`, the bytes of the rows. Raises BadNumber for NaN or Inf."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = raws[0].reshape(span.rows, -1)
        with np.errstate(all="ignore"):  # the result is checked below
            out: Matrix = dequantize(rows, GGMLQuantizationType[self.dtype])
        if not np.isfinite(out).all():
            raise BadNumber("a value is NaN or Inf")
        return Numbers.of(np.ascontiguousarray(out))


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of a tensor's rows (or columns) in a file: those before `kept` stay, the others are counted like
    the elements of an array of the shape `counts`, a step along which is so many places in the file as `steps` says.
    """

    counts: tuple[int, ...]
    steps: tuple[int, ...]
    kept: int = 0
    first: int = 0

    def places(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns where rows (or columns) start..stop - 1 of a tensor lie in the file: their numbers there, int64 [stop
        - start]."""
        rows = np.arange(start, stop)
        others = np.unravel_index(np.maximum(rows - self.kept, 0), self.counts)
        moved = self.kept + self.first + np.stack(others, axis=-1) @ np.array(self.steps)
        return np.where(rows < self.kept, rows, moved)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields rows start..stop - 1 of a tensor, in order, as ranges (first, last + 1) of consecutive row numbers in
        the file."""
        places = self.places(start, stop)
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


@dataclass(frozen=True, slots=True)
class TensorView:
    """The transformation from a file's numbers to a tensor's.

    Attributes:
        rows, columns: where they are in the file; None: in their places.
        value: returns the tensor's numbers from the file's.
        sharing: how many tensors have as many rows each of one tensor of the file.
        in_runs: whether the file has a vector as rows, one behind the other.
    """

    rows: Order | None = None
    columns: Order | None = None
    value: Callable[[Matrix], Matrix] | None = None
    sharing: int = 1
    in_runs: bool = False


@dataclass(frozen=True, slots=True)
class Viewed:
    """A storage seen through a `TensorView`."""

    storage: Storage
    view: TensorView

    @property
    def label(self) -> str:
        """The name, for messages, of the number type in which the file stores the tensor, such as "bf16"."""
        return self.storage.label

    @property
    def lossless(self) -> str | None:
        """The name of the smallest of kt's formats that holds the tensor exactly; None: only f32 does, or the
        `TensorView` reorders columns or changes values."""
        return self.storage.lossless if self._is_rows else None

    @property
    def _is_rows(self) -> bool:
        return self.view.columns is None and self.view.value is None

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of the tensor: where its `TensorView`
        reorders rows, one for each run of rows that are consecutive in the file."""
        if self.view.rows is None:
            return self.storage.reads(span)
        part = span.source.parts[0]
        row_bytes = part.entry.size_bytes // (span.source.rows * self.view.sharing)
        runs = self.view.rows.runs(span.start, span.stop)
        return [rows_of(part, row_bytes, start, stop) for start, stop in runs]

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of the tensor, [rows, columns], from `raws`, the bytes of the ranges
        that `reads` returns: f32 where its `TensorView` reorders columns or changes values, else in the stored type."""
        stored = self.storage.numbers(pool, span, (_joined(raws),))
        if self._is_rows:
            return stored
        matrix: Matrix = pool.decode(stored.whole)
        if self.view.columns is not None:
            matrix = matrix[:, self.view.columns.places(0, span.source.columns)]
        if self.view.value is not None:
            matrix = self.view.value(matrix)
        return Numbers.of(np.ascontiguousarray(matrix))

    def kept(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw], fmt: Format) -> Matrix | None:
        """Returns the stored scales of the rows of a span, one for each group of columns of `fmt`, f32 [rows, groups];
        None: `fmt` cannot hold the rows exactly with them, or the `TensorView` reorders columns or changes values."""
        return self.storage.kept(pool, span, (_joined(raws),), fmt) if self._is_rows else None


@dataclass(frozen=True, slots=True)
class Scaled(ScalesNotKept):
    """A storage whose numbers are multiplied by one f32, which is the last part."""

    storage: Storage
    lossless: None = None

    @property
    def label(self) -> str:
        """The name, for messages, of the number type in which the file stores the tensor, such as "bf16"."""
        return self.storage.label

    def reads(self, span: ByteSpan) -> Sequence[Read]:
        """Returns the byte ranges to read for rows [span.start, span.stop) of the tensor, followed by that of the f32
        number that the whole tensor is multiplied by."""
        scale = span.source.parts[-1]
        return (*self.storage.reads(span), rows_of(scale, scale.entry.size_bytes, 0, 1))

    def numbers(self, pool: Pool, span: ByteSpan, raws: Sequence[Raw]) -> Numbers:
        """Returns rows [span.start, span.stop) of the tensor, multiplied by the tensor's factor, as an f32 matrix, from
        `raws`, the bytes of the ranges that `reads` returns. Raises BadNumber if a product is NaN or Inf."""
        *stored, scale = raws
        matrix: Matrix = pool.decode(self.storage.numbers(pool, span, stored).whole)
        with np.errstate(all="ignore"):
            matrix *= scale.view("<f4")[0]
        if not np.isfinite(matrix).all():
            raise BadNumber("a value is NaN or Inf")
        return Numbers.of(matrix)


def _joined(raws: Sequence[Raw]) -> Raw:
    return raws[0] if len(raws) == 1 else np.concatenate(raws)


def less_one(stored: Matrix) -> Matrix:
    """Returns stored - 1, f32: the weights of a norm that multiplies by 1 + weight, of which the file stores 1 +
    weight."""
    return stored - np.float32(1)


def log_of_rate(stored: Matrix) -> Matrix:
    """Returns log(-stored), f32: the logarithms of decay rates, which the file stores negated. Raises BadNumber for a
    rate that is not below zero."""
    return _log(-stored, "a decay rate is not below zero")


def log_of_positive(stored: Matrix) -> Matrix:
    """Returns log(stored), f32: the logarithms of decay rates, which the file stores as they are. Raises BadNumber for
    a rate that is not above zero."""
    return _log(stored, "a decay rate is not above zero")


def _log(rates: Matrix, wrong: str) -> Matrix:
    with np.errstate(all="ignore"):
        logs: Matrix = np.log(rates)
    if not np.isfinite(logs).all():
        raise BadNumber(wrong)
    return logs


_OTHERS = (
    "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "NVFP4",
)  # fmt: skip
# The storages by the types' names in ggml.
STORAGES: dict[str, Storage] = {
    **PLAIN,
    "Q4_0": HalfScales(DType.Q4_0, "int4-g32-f32"),
    **{name: PlainStorage(DType[name], None) for name in ("Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{name: PlainStorage(DType[name], None) for name in ("Q4_K", "Q5_K", "Q6_K")},
    "MXFP4": PlainStorage(DType.GGUF_MXFP4, "mxfp4"),
    **{name: Packaged(name) for name in _OTHERS},
    "I32": WHOLE["I32"],
}
