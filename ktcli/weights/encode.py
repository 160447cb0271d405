"""From the tensors of a checkpoint to the stored bytes of a model's tensors, in bounded memory.

A tensor is cut into *pieces*: some rows of one of its matrices, at most 16 MiB as f32. Pieces are read
ahead by threads of their own while the pool decodes and packs the one before, and come out in the order
in which their bytes are stored. Where the cuts lie depends on shapes alone, so the bytes and the error
sums do not depend on the machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.native import PANEL_ROWS, Format, PackError, Pool, packed_bytes
from ktcli.ops.tensors import Role, Stored, Tensor, ceil_to
from ktcli.weights.coded import FP8_BLOCK
from ktcli.weights.columns import factors_of, suffers
from ktcli.weights.oracle import round_to_bf16
from ktcli.weights.recipe import Recipe, TensorKind, format_of, is_in_f32, kind_of
from ktcli.weights.stages import Stages, Stopwatch
from ktcli.weights.storage import PIECE_ELEMENTS, Matrix, Raw, Read, Reader, Source, Span

ROUND_ELEMENTS = 1 << 16  # numpy makes several arrays of it: they should stay in the cache
SAMPLE = 1024  # rows of a head, which are read twice
LEAST_IMPORTANCE = 2.0**-20  # and its inverse the most: of kt_pack
READ_AHEAD = 2  # pieces, each read by its own thread


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a checkpoint tensor that a piece uses.

    Attributes:
        stored: what the model says of the tensor.
        span: which of the piece's spans holds them.
        chosen: which rows of the span, or of its transpose; which elements of a vector.
    """

    stored: Stored
    span: int
    chosen: slice


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one matrix of a tensor.

    Attributes:
        spans: to read and decode, each once.
        rows: what is taken from them: stacked, or of gate and of up, which alternate. Of none: zeros.
        index: of the matrix.
    """

    tensor: Tensor
    spans: tuple[Span, ...]
    rows: tuple[Rows, ...]
    index: int = 0


class Slots:
    """Memory used again and again, so that what a conversion needs is soon reached and never exceeded.

    What `take` returns stays as it is until `count` more were taken.
    """

    def __init__(self, count: int) -> None:
        self._slots = deque([np.empty(0, dtype=np.uint8)] * count)

    def take(self, size_bytes: int) -> Raw:
        """Memory with undefined contents."""
        self._slots.rotate(-1)
        if self._slots[0].size < size_bytes:
            self._slots[0] = np.empty(0, dtype=np.uint8)  # give it back first
            self._slots[0] = np.empty(size_bytes, dtype=np.uint8)
        return self._slots[0][:size_bytes]


class Encoder:
    """Encodes the tensors of one checkpoint by one recipe.

    Attributes:
        sums: by kind of tensor, of what was packed since the caller last cleared it.
    """

    def __init__(
        self,
        checkpoint: Reader,
        recipe: Recipe,
        pool: Pool,
        importance: Mapping[str, Matrix] = MappingProxyType({}),
    ) -> None:
        """importance: of the columns of each matrix, by tensor, [count, k]; see kt_pack."""
        self._checkpoint, self._recipe, self._pool = checkpoint, recipe, pool
        self._importance = importance
        self._raw = Slots(READ_AHEAD + 1)  # being read, and being decoded
        self._part = Slots(2)  # being written, and being packed
        self._factors: dict[str, Matrix] = {}  # [k], by the vector that takes them over
        self.sums: dict[TensorKind, PackError] = {}
        self._reading, self._encoding = Stopwatch(), Stopwatch()
        self._source_bytes = 0

    def encode(self, tensors: Sequence[Tensor]) -> Iterator[NDArray[np.uint8]]:
        """The stored bytes of `tensors`, one behind the other, in parts.

        A part stays as it is until the second one after it is asked for.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for its format, or a file cannot be read.
        """
        pieces = (piece for tensor in tensors for piece in cut(tensor, self._checkpoint))
        for piece, raws in self._read_ahead(pieces):
            with self._encoding.running():
                part = self._encoded(piece, raws)
            yield part

    def stages(self, seconds: float, writing: float) -> Stages:
        """What all of this took, in `seconds`, of which what it made was being written for `writing`."""
        threads, read, encode = self._pool.threads, self._reading.seconds, self._encoding.seconds
        return Stages(self._source_bytes, threads, seconds, read, encode, writing)

    def _encoded(self, piece: Piece, raws: list[list[Raw]]) -> Raw:
        pairs = zip(piece.spans, raws, strict=True)
        values = [self._checkpoint.decode(self._pool, span, raw) for span, raw in pairs]
        taken = [_take(values[rows.span], rows) for rows in piece.rows]
        return self._stored(piece, taken or [np.zeros((piece.tensor.k, 1), np.float32)], raws)

    def _read_ahead(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, list[list[Raw]]]]:
        readers = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="kt-read")
        waiting: deque[tuple[Piece, Future[list[list[Raw]]]]] = deque()
        try:
            for piece in pieces:
                wanted = [span.source.storage.reads(span) for span in piece.spans]
                memory = self._raw.take(sum(_aligned(read) for reads in wanted for read in reads))
                self._source_bytes += sum(read.total_bytes for reads in wanted for read in reads)
                waiting.append((piece, readers.submit(self._read, wanted, memory)))
                if len(waiting) > READ_AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            readers.shutdown(cancel_futures=True)

    def _read(self, wanted: list[Sequence[Read]], memory: Raw) -> list[list[Raw]]:
        """What each span wants, in one block of memory."""
        raws: list[list[Raw]] = [[] for _ in wanted]
        with self._reading.running():
            for reads, into in zip(wanted, raws, strict=True):
                for read in reads:
                    into.append(self._checkpoint.read(read, memory[: read.total_bytes]))
                    memory = memory[_aligned(read) :]
        return raws

    def _stored(self, piece: Piece, values: list[Matrix], raws: list[list[Raw]]) -> Raw:
        tensor = piece.tensor
        fmt = format_of(tensor, self._recipe)
        if fmt is None:
            return self._plain(tensor, _in_turn(values) if tensor.alternate else _stacked(values))
        kept = [self._kept(fmt, piece, rows, raws) for rows in piece.rows]
        if tensor.alternate:
            return self._pack_alternate(piece, fmt, values, kept)
        matrix, scales = _stacked(values), _stacked_scales(values, kept)
        if tensor.gain is not None and scales is None and suffers(fmt):
            matrix = self._even(tensor, tensor.gain, matrix)
        return self._pack(piece, fmt, matrix, scales)

    def _even(self, tensor: Tensor, gain: Tensor, matrix: Matrix) -> Matrix:
        """These rows of a tensor with columns on one scale; what its gain is to be multiplied with is kept."""
        if gain.name not in self._factors:
            (piece,) = cut(gain, self._checkpoint)
            parts = [_take(self._now(piece.spans[part.span]), part) for part in piece.rows]
            largest = self._largest(sample(tensor, self._checkpoint))
            self._factors[gain.name] = factors_of(largest, _stacked(parts).reshape(-1))
        with np.errstate(over="ignore"):  # packing refuses what is too large
            return matrix / self._factors[gain.name]

    def _largest(self, spans: list[Span]) -> Matrix:
        """Magnitudes [k] of the largest numbers in the columns of spans, of which one is in memory at a time."""
        found = (np.abs(self._now(span)).max(axis=0) for span in spans)
        return reduce(np.maximum, found)

    def _now(self, span: Span) -> Matrix:
        """What a span holds, ahead of its turn."""
        raws = [self._checkpoint.read(each) for each in span.source.storage.reads(span)]
        return self._checkpoint.decode(self._pool, span, raws)

    def _counts(self, piece: Piece) -> Matrix | None:
        found = self._importance.get(piece.tensor.name)
        if found is None:
            return None
        counts: Matrix = found[piece.index]
        if (gain := piece.tensor.gain) is not None and gain.name in self._factors:
            counts = counts * self._factors[gain.name] ** 2
            counts = np.clip(counts, LEAST_IMPORTANCE, 1 / LEAST_IMPORTANCE)
        return counts

    def _kept(self, fmt: Format, piece: Piece, rows: Rows, raws: list[list[Raw]]) -> Matrix | None:
        """Scales of these rows that make `fmt` hold them exactly; None: it chooses its own."""
        if rows.stored.transposed or rows.stored.plus:
            return None
        span = piece.spans[rows.span]
        kept = span.source.storage.kept(self._pool, span, raws[rows.span], fmt)
        return None if kept is None else kept[rows.chosen]

    def _plain(self, tensor: Tensor, matrix: Matrix) -> NDArray[np.uint8]:
        if tensor.role is Role.VECTOR:
            vector = np.ascontiguousarray(matrix).reshape(-1)
            if tensor.name in self._factors:
                with np.errstate(over="ignore"):  # refused in the next line
                    vector = vector * self._factors[tensor.name]
                if not np.isfinite(vector).all():
                    raise _too_large(tensor)
            return vector.view(np.uint8)
        if is_in_f32(tensor, self._recipe):
            return np.ascontiguousarray(matrix).reshape(-1).view(np.uint8)
        rounded = self._part.take(2 * matrix.size).view(np.uint16)
        flat = matrix.reshape(-1)
        for start in range(0, matrix.size, ROUND_ELEMENTS):
            part = round_to_bf16(flat[start : start + ROUND_ELEMENTS])
            if np.any((part & 0x7F80) == 0x7F80):
                raise _too_large(tensor)
            rounded[start : start + ROUND_ELEMENTS] = part
        return rounded.view(np.uint8)

    def _pack(
        self, piece: Piece, fmt: Format, matrix: Matrix, scales: Matrix | None
    ) -> NDArray[np.uint8]:
        stored, matrix = (
            self._part.take(packed_bytes(fmt, *matrix.shape)),
            np.ascontiguousarray(matrix),
        )
        counts = self._counts(piece)
        sums = self._pool.pack(fmt, matrix, stored, scales=scales, importance=counts)
        self._add(piece.tensor, sums)
        return stored

    def _pack_alternate(
        self, piece: Piece, fmt: Format, values: list[Matrix], scales: list[Matrix | None]
    ) -> NDArray[np.uint8]:
        """Panels of two matrices [rows, k] in turn: first, second, first, second …"""
        one, counts = packed_bytes(fmt, PANEL_ROWS, piece.tensor.k), self._counts(piece)
        stored = self._part.take(2 * packed_bytes(fmt, *values[0].shape))
        for which, (matrix, kept) in enumerate(zip(values, scales, strict=True)):
            target = stored[which * one :]
            matrix = np.ascontiguousarray(matrix)
            sums = self._pool.pack(
                fmt, matrix, target, scales=kept, importance=counts, panel_step=2
            )
            self._add(piece.tensor, sums)
        return stored

    def _add(self, tensor: Tensor, sums: PackError) -> None:
        if not all(map(math.isfinite, sums)):
            raise _too_large(tensor)
        kind = kind_of(tensor)
        assert kind is not None
        before = self.sums.get(kind, PackError(0.0, 0.0, 0.0, 0.0, 0.0))
        self.sums[kind] = PackError(*map(sum, zip(before, sums, strict=True)))


def sample(tensor: Tensor, checkpoint: Reader) -> list[Span]:
    """Up to SAMPLE rows of a plain matrix, in runs spread over all of it."""
    (stored,) = pieces_of(tensor, checkpoint)
    source = checkpoint.find(stored.name, stored.shape)
    between = max(tensor.n * PANEL_ROWS // SAMPLE, PANEL_ROWS)
    starts = range(0, tensor.n, between)
    return [Span(source, start, min(start + PANEL_ROWS, tensor.n)) for start in starts]


def _aligned(read: Read) -> int:
    """Bytes that keep what follows on a 64-byte boundary."""
    return ceil_to(read.total_bytes, 64)


def _take(values: Matrix, rows: Rows) -> Matrix:
    if len(rows.stored.one) < 2:
        values = values.reshape(-1, 1)
    taken = (values.T if rows.stored.transposed else values)[rows.chosen]
    return taken + np.float32(rows.stored.plus) if rows.stored.plus else taken


def _stacked(values: list[Matrix]) -> Matrix:
    return values[0] if len(values) == 1 else np.concatenate(values)


def _in_turn(values: list[Matrix]) -> Matrix:
    """Two vectors [I, 1], padded with zeros to whole runs of 16: a run of the first, one of the second …"""
    gap = -len(values[0]) % PANEL_ROWS
    runs = [np.pad(each, ((0, gap), (0, 0))).reshape(-1, 1, PANEL_ROWS) for each in values]
    return np.concatenate(runs, axis=1)


def _stacked_scales(values: list[Matrix], kept: list[Matrix | None]) -> Matrix | None:
    """Of all rows of a piece; 0, which lets the format choose, for those that have none."""
    groups = next((scales.shape[1] for scales in kept if scales is not None), None)
    if groups is None:
        return None
    pairs = zip(values, kept, strict=True)
    return _stacked([np.zeros((len(v), groups), np.float32) if s is None else s for v, s in pairs])


def pieces_of(tensor: Tensor, checkpoint: Reader) -> tuple[Stored, ...]:
    """The alternative of `tensor.sources` that the checkpoint has: the first whose names and shapes are
    there, else the first whose names are, else the first."""
    named = [
        pieces
        for pieces in tensor.sources
        if all(piece.at(0) in checkpoint.names for piece in pieces)
    ]
    for pieces in named if len(named) > 1 else ():
        if pieces and all(checkpoint.find(piece.at(0)).shape == piece.shape for piece in pieces):
            return pieces
    return (named or tensor.sources)[0]


def cut(tensor: Tensor, checkpoint: Reader) -> Iterator[Piece]:
    """The pieces of a tensor in the order of their bytes.

    Raises:
        BadCheckpoint: a source is missing or has another shape than the model says.
    """
    pieces = pieces_of(tensor, checkpoint)
    if not pieces:
        yield Piece(tensor, (), ())
        return
    rows = pieces[0].rows if tensor.alternate else sum(piece.rows for piece in pieces)
    step = _step(tensor, pieces) or rows
    for index in range(tensor.count):
        sources = [checkpoint.find(piece.at(index), piece.shape) for piece in pieces]
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            spans: dict[Span, int] = {}
            chosen = [
                _rows(stored, source, index, first, last, spans)
                for stored, source, first, last in _shares(tensor, pieces, sources, start, stop)
            ]
            yield Piece(tensor, tuple(spans), tuple(chosen), index)


def _step(tensor: Tensor, pieces: Sequence[Stored]) -> int:
    """Rows of one piece; 0: all. Whole blocks of FP8 where possible, so that no factor is read twice."""
    if tensor.role is Role.VECTOR or any(piece.transposed for piece in pieces):
        return 0
    at_once = PIECE_ELEMENTS // (tensor.k * (2 if tensor.alternate else pieces[0].step))
    return at_once // FP8_BLOCK * FP8_BLOCK or max(at_once // PANEL_ROWS, 1) * PANEL_ROWS


def _shares(
    tensor: Tensor, pieces: Sequence[Stored], sources: Sequence[Source], start: int, stop: int
) -> Iterator[tuple[Stored, Source, int, int]]:
    """Which rows [first, last) of each piece make rows [start, stop) of the tensor's matrix; of both pieces
    of gate and up the same."""
    above = 0
    for piece, source in zip(pieces, sources, strict=True):
        low, high = max(start - above, 0), min(stop - above, piece.rows)
        if low < high:
            yield piece, source, low, high
        above += 0 if tensor.alternate else piece.rows


def _rows(
    stored: Stored, source: Source, index: int, low: int, high: int, spans: dict[Span, int]
) -> Rows:
    """Rows [low, high) of what `stored` gives, from a span that is added to `spans` if it is not there."""
    height = prod(stored.one[:-1])  # 1 for a vector, whose elements are chosen afterwards
    base = index * height if stored.matrix else 0
    if stored.band:
        base = index * stored.band.stride + stored.band.first
    first, step = stored.first + low * stored.step, stored.step
    if stored.transposed or len(stored.one) < 2:
        span, inside = Span(source, base, base + height), first
    else:
        skipped = first // step * step
        last = min(skipped + (high - low) * step, height)
        span, inside = Span(source, base + skipped, base + last), first - skipped
    chosen = slice(inside, inside + (high - low - 1) * step + 1, step)
    return Rows(stored, spans.setdefault(span, len(spans)), chosen)


def _too_large(tensor: Tensor) -> BadCheckpoint:
    return BadCheckpoint(f"{tensor.name} holds values that are too large for its number format")
