"""Cuts tensors into strips: some rows of one matrix, few enough to read, encode and write strips in parallel.

A strip says which rows of which sources it is made of, and in which order they are stored. The cuts depend on shapes
alone, so neither the bytes of a conversion nor its sums of errors depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ktcli.native import PANEL_ROWS
from ktcli.ops.tensors import Role, Stored, Tensor, ceil_to
from ktcli.records import dataclass
from ktcli.weights.coded import FP8_BLOCK
from ktcli.weights.storage import STRIP_ELEMENTS, ByteSpan, Matrix, Reader, StorageSource

SAMPLE = 1024  # rows of a head, which are read twice


@dataclass(frozen=True, slots=True)
class StripRows:
    """The rows of a checkpoint tensor that a strip uses.

    Attributes:
        stored: the model's declaration of the tensor.
        span: the index of the strip's span that holds them.
        chosen: the rows of the span, or of its transpose; the elements of a vector.
    """

    stored: Stored
    span: int
    chosen: slice


@dataclass(frozen=True, slots=True)
class Strip:
    """Some rows of one matrix of a tensor.

    Attributes:
        spans: the rows that are read of the sources, each span once.
        rows: the rows that are taken from the spans: stacked, or those of gate and of up, which alternate. (): zeros.
        index: the number of the matrix.
    """

    tensor: Tensor
    spans: tuple[ByteSpan, ...]
    rows: tuple[StripRows, ...]
    index: int = 0

    def is_transposed(self, span: int) -> bool:
        """Returns whether the strip's rows are columns of its span number `span`, because the checkpoint stores that
        matrix transposed."""
        return any(rows.stored.transposed for rows in self.rows if rows.span == span)

    @property
    def map(self) -> NDArray[np.int32]:
        """Where each of the n rows of the strip comes from, int32 [n, 2]: (index of a span, row within the span); (-1,
        -1) for a row of padding."""
        slices = (rows.chosen for rows in self.rows)
        taken = [np.arange(each.start, each.stop, each.step) for each in slices]
        alternate = self.tensor.alternate
        heights = [ceil_to(len(each), PANEL_ROWS) if alternate else len(each) for each in taken]
        found, above = np.full((sum(heights), 2), -1, np.int32), 0
        for rows, each, height in zip(self.rows, taken, heights, strict=True):
            found[above : above + len(each), 0] = rows.span
            found[above : above + len(each), 1] = each
            above += height
        if alternate:
            found = found.reshape(2, -1, PANEL_ROWS, 2).swapaxes(0, 1).reshape(-1, 2)
        return found


def pieces_of(tensor: Tensor, checkpoint: Reader) -> tuple[Stored, ...]:
    """Returns the checkpoint tensors, or parts of them, that a model's tensor is made of: the first alternative in
    `tensor.sources` whose names and shapes the checkpoint has, else the first whose names it has, else the first."""
    named = [
        pieces
        for pieces in tensor.sources
        if all(piece.at(0) in checkpoint.names for piece in pieces)
    ]
    for pieces in named if len(named) > 1 else ():
        if pieces and all(checkpoint.find(piece.at(0)).shape == piece.shape for piece in pieces):
            return pieces
    return (named or tensor.sources)[0]


def cut(tensor: Tensor, checkpoint: Reader) -> Iterator[Strip]:
    """Yields the strips, each some rows of one matrix, that a tensor is converted in, in the order in which a pack
    stores them.

    Raises:
        BadCheckpoint: a source is missing or has another shape than the model says.
    """
    pieces = pieces_of(tensor, checkpoint)
    if not pieces:
        yield Strip(tensor, (), ())
        return
    rows = pieces[0].rows if tensor.alternate else sum(piece.rows for piece in pieces)
    step = _step(tensor, pieces) or rows
    for index in range(tensor.count):
        sources = [checkpoint.find(piece.at(index), piece.shape) for piece in pieces]
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            spans: dict[ByteSpan, int] = {}
            chosen = [
                _rows(stored, source, index, first, last, spans)
                for stored, source, first, last in _shares(tensor, pieces, sources, start, stop)
            ]
            yield Strip(tensor, tuple(spans), tuple(chosen), index)


def _step(tensor: Tensor, pieces: Sequence[Stored]) -> int:
    """The number of rows of one strip; 0: all. Whole blocks of FP8 where possible, so that no factor is read twice."""
    if tensor.role is Role.VECTOR or any(piece.transposed for piece in pieces):
        return 0
    at_once = STRIP_ELEMENTS // (tensor.k * (2 if tensor.alternate else pieces[0].step))
    return at_once // FP8_BLOCK * FP8_BLOCK or max(at_once // PANEL_ROWS, 1) * PANEL_ROWS


def _shares(
    tensor: Tensor,
    pieces: Sequence[Stored],
    sources: Sequence[StorageSource],
    start: int,
    stop: int,
) -> Iterator[tuple[Stored, StorageSource, int, int]]:
    """Yields the rows [first, last) of each piece that make rows [start, stop) of the tensor's matrix; gate and up
    give the same rows of both."""
    above = 0
    for piece, source in zip(pieces, sources, strict=True):
        low, high = max(start - above, 0), min(stop - above, piece.rows)
        if low < high:
            yield piece, source, low, high
        above += 0 if tensor.alternate else piece.rows


def _rows(
    stored: Stored,
    source: StorageSource,
    index: int,
    low: int,
    high: int,
    spans: dict[ByteSpan, int],
) -> StripRows:
    """The rows [low, high) of `stored`, from a span that is added to `spans` if it is not there."""
    height = prod(stored.one[:-1])  # 1 for a vector, whose elements are chosen afterwards
    base = index * height if stored.matrix else 0
    if stored.band:
        base = index * stored.band.stride + stored.band.first
    first, step = stored.first + low * stored.step, stored.step
    if stored.transposed or len(stored.one) < 2:
        span, inside = ByteSpan(source, base, base + height), first
    else:
        skipped = first // step * step
        last = min(skipped + (high - low) * step, height)
        span, inside = ByteSpan(source, base + skipped, base + last), first - skipped
    chosen = slice(inside, inside + (high - low - 1) * step + 1, step)
    return StripRows(stored, spans.setdefault(span, len(spans)), chosen)


def sample(tensor: Tensor, checkpoint: Reader) -> list[ByteSpan]:
    """Returns spans of 16 rows each, spread evenly over a plain matrix of the checkpoint, with about SAMPLE (1024) rows
    in all; all rows if there are no more."""
    (stored,) = pieces_of(tensor, checkpoint)
    source = checkpoint.find(stored.name, stored.shape)
    between = max(tensor.n * PANEL_ROWS // SAMPLE, PANEL_ROWS)
    starts = range(0, tensor.n, between)
    return [ByteSpan(source, start, min(start + PANEL_ROWS, tensor.n)) for start in starts]


def vector_of(strip: Strip, values: Sequence[Matrix]) -> Matrix:
    """Returns the vector [k] f32 that a strip of a vector tensor stores, taken from the values of its spans; zeros if
    the strip has no rows.

    Args:
        values: the values of each span, [rows, columns] f32.
    """
    parts = [_taken(values[rows.span], rows) for rows in strip.rows]
    if not parts:
        return np.zeros(strip.tensor.k, np.float32)
    joined = _in_turn(parts) if strip.tensor.alternate else np.concatenate(parts)
    return joined.reshape(-1)


def _taken(values: Matrix, rows: StripRows) -> Matrix:
    """The chosen elements or rows of a span."""
    if len(rows.stored.one) < 2:
        values = values.reshape(-1, 1)
    taken = (values.T if rows.stored.transposed else values)[rows.chosen]
    return taken + np.float32(rows.stored.plus) if rows.stored.plus else taken


def _in_turn(parts: Sequence[Matrix]) -> Matrix:
    """Interleaves two vectors [I, 1], padded with zeros to whole runs of 16: a run of the first, one of the second …"""
    gap = -len(parts[0]) % PANEL_ROWS
    runs = [np.pad(each, ((0, gap), (0, 0))).reshape(-1, 1, PANEL_ROWS) for each in parts]
    return np.concatenate(runs, axis=1)
