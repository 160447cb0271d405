"""From the tensors of a checkpoint to the stored bytes of a model's tensors, in bounded memory.

A tensor is cut into *pieces*: some rows of one of its matrices, at most 16 MiB as f32. Pieces are read
ahead by threads of their own while the pool decodes and packs the one before, and come out in the order
in which their bytes are stored. Where the cuts lie depends on shapes alone, so the bytes and the error
sums do not depend on the machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.layers.tensors import Role, Tensor, ceil_to, stack_rows
from ktcli.native import PANEL_ROWS, Codes, Format, Pool, packed_bytes
from ktcli.weights.checkpoint import FP8_BLOCK, Checkpoint, Source, Span
from ktcli.weights.oracle import round_to_bf16
from ktcli.weights.recipe import Recipe, format_of

PIECE_ELEMENTS = 4 << 20  # large enough to keep many cores busy, small beside any layer
ROUND_ELEMENTS = 1 << 16  # numpy makes several arrays of it: they should stay in the cache
READ_AHEAD = 2  # pieces, each read by its own thread

Raw = NDArray[np.uint8]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Spans to read together, and the matrices of the tensor they give.

    Attributes:
        spans: rows of one matrix (stacked; or of gate and of up, which alternate), or whole sources
            from which the tensor's `join` makes matrices.
        indices: the matrices made from them; more than one only with `join`.
    """

    tensor: Tensor
    spans: tuple[Span, ...]
    indices: range


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
        sums: by kind of tensor, (sum of squared error, sum of squares) of what was packed since the
            caller last cleared it.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, pool: Pool) -> None:
        self._checkpoint, self._recipe, self._pool = checkpoint, recipe, pool
        self._raw = Slots(READ_AHEAD + 1)  # being read, and being decoded
        self._part = Slots(2)  # being written, and being packed
        self.sums: dict[Role, tuple[float, float]] = {}

    def encode(self, tensors: Sequence[Tensor]) -> Iterator[NDArray[np.uint8]]:
        """The stored bytes of `tensors`, one behind the other, in parts.

        A part stays as it is until the second one after it is asked for.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for its format, or a file cannot be read.
        """
        pieces = (piece for tensor in tensors for piece in cut(tensor, self._checkpoint))
        for piece, raws in self._read_ahead(pieces):
            spans = zip(piece.spans, raws, strict=True)
            values = [self._checkpoint.decode(self._pool, span, raw) for span, raw in spans]
            yield from self._stored(piece, values)
            del values  # before the next ones are made

    def _read_ahead(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, list[Raw]]]:
        readers = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="kt-read")
        waiting: deque[tuple[Piece, Future[list[Raw]]]] = deque()
        try:
            for piece in pieces:
                memory = self._raw.take(sum(_aligned(span) for span in piece.spans))
                waiting.append((piece, readers.submit(self._read, piece, memory)))
                if len(waiting) > READ_AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            readers.shutdown(cancel_futures=True)

    def _read(self, piece: Piece, memory: Raw) -> list[Raw]:
        raws = []
        for span in piece.spans:
            raws.append(self._checkpoint.read(span, memory[: span.size_bytes]))
            memory = memory[_aligned(span) :]
        return raws

    def _stored(self, piece: Piece, values: list[Matrix]) -> Iterator[NDArray[np.uint8]]:
        tensor = piece.tensor
        fmt = format_of(tensor, self._recipe)
        if tensor.alternate and fmt is not None:
            scales = [self._scales(fmt, (span,)) for span in piece.spans]
            yield self._pack_alternate(tensor, fmt, values, scales)
            return
        for index in piece.indices:
            matrix = _matrix(piece, values, index)
            if fmt is None:
                yield self._plain(tensor, matrix)
                continue
            kept = self._scales(fmt, piece.spans) if tensor.join is stack_rows else None
            yield self._pack(tensor, fmt, matrix, kept)

    def _scales(self, fmt: Format, spans: Sequence[Span]) -> Matrix | None:
        """The factors of FP8 sources, for a format that keeps them: [rows of all spans, groups]; 0 for rows of
        other sources. None: there is nothing to keep.

        Each row has scales of its own, so sources may meet, and pieces may end, within a block.
        """
        if fmt.codes is not Codes.E4M3 or fmt.group != FP8_BLOCK:
            return None
        found = [self._checkpoint.row_scales(self._pool, span) for span in spans]
        groups = -(-spans[0].source.columns // FP8_BLOCK)
        if all(each is None for each in found):
            return None
        chosen = [np.zeros((span.stop - span.start, groups), dtype=np.float32) for span in spans]
        pairs = zip(found, chosen, strict=True)
        return np.concatenate([zeros if each is None else each for each, zeros in pairs])

    def _plain(self, tensor: Tensor, matrix: Matrix) -> NDArray[np.uint8]:
        if tensor.role is Role.VECTOR:
            return matrix.reshape(-1).view(np.uint8)
        rounded = self._part.take(2 * matrix.size).view(np.uint16)
        flat = matrix.reshape(-1)
        for start in range(0, matrix.size, ROUND_ELEMENTS):
            part = round_to_bf16(flat[start : start + ROUND_ELEMENTS])
            if np.any((part & 0x7F80) == 0x7F80):
                raise _too_large(tensor)
            rounded[start : start + ROUND_ELEMENTS] = part
        return rounded.view(np.uint8)

    def _pack(
        self, tensor: Tensor, fmt: Format, matrix: Matrix, scales: Matrix | None
    ) -> NDArray[np.uint8]:
        stored = self._part.take(packed_bytes(fmt, *matrix.shape))
        sums = self._pool.pack(fmt, np.ascontiguousarray(matrix), stored, scales=scales)
        self._add(tensor, sums)
        return stored

    def _pack_alternate(
        self, tensor: Tensor, fmt: Format, values: list[Matrix], scales: list[Matrix | None]
    ) -> NDArray[np.uint8]:
        """Panels of two matrices [rows, k] in turn: first, second, first, second …"""
        one = packed_bytes(fmt, PANEL_ROWS, tensor.k)
        stored = self._part.take(2 * packed_bytes(fmt, *values[0].shape))
        for which, (matrix, kept) in enumerate(zip(values, scales, strict=True)):
            target = stored[which * one :]
            matrix = np.ascontiguousarray(matrix)
            self._add(tensor, self._pool.pack(fmt, matrix, target, scales=kept, panel_step=2))
        return stored

    def _add(self, tensor: Tensor, sums: tuple[float, float]) -> None:
        if not all(map(math.isfinite, sums)):
            raise _too_large(tensor)
        before = self.sums.get(tensor.role, (0.0, 0.0))
        self.sums[tensor.role] = (before[0] + sums[0], before[1] + sums[1])


def _aligned(span: Span) -> int:
    """Bytes that keep what follows on a 64-byte boundary."""
    return ceil_to(span.size_bytes, 64)


def _matrix(piece: Piece, values: list[Matrix], index: int) -> Matrix:
    """Matrix `index` of the piece's tensor, or some rows of it."""
    tensor = piece.tensor
    if tensor.join is not stack_rows:
        pairs = zip(values, piece.spans, strict=True)
        shaped = [value.reshape(span.source.entry.shape) for value, span in pairs]
        matrix = np.ascontiguousarray(tensor.join(shaped, index), dtype=np.float32)
        return matrix.reshape(tensor.n, tensor.k)
    if tensor.role is Role.VECTOR:
        return np.concatenate([value.reshape(-1) for value in values]).reshape(tensor.n, tensor.k)
    return values[0] if len(values) == 1 else np.concatenate(values)


def cut(tensor: Tensor, checkpoint: Checkpoint) -> Iterator[Piece]:
    """The pieces of a tensor in the order of their bytes.

    Raises:
        BadCheckpoint: a source is missing or has another shape than the model says.
    """
    joined = not tensor.alternate and tensor.join is not stack_rows
    if joined and tensor.source_names(0) == tensor.source_names(1):
        # All matrices come from the same sources (kv_b): read them once.
        yield Piece(tensor, tuple(map(Span, _sources(tensor, checkpoint, 0))), range(tensor.count))
        return
    for index in range(tensor.count):
        sources = _sources(tensor, checkpoint, index)
        one = range(index, index + 1)
        if joined or tensor.role is Role.VECTOR:
            yield Piece(tensor, tuple(map(Span, sources)), one)
            continue
        width = tensor.k * (2 if tensor.alternate else 1)
        step = max(PIECE_ELEMENTS // width // PANEL_ROWS, 1) * PANEL_ROWS
        rows = sources[0].rows if tensor.alternate else sum(source.rows for source in sources)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            if tensor.alternate:
                spans = tuple(Span(source, start, stop) for source in sources)
            else:
                spans = tuple(_overlap(sources, start, stop))
            yield Piece(tensor, spans, one)


def check(tensors: Iterable[Tensor], checkpoint: Checkpoint) -> int:
    """That a checkpoint has all sources of `tensors`, in shapes that give them; their size in bytes.

    Raises:
        BadCheckpoint: it has not.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        for index in range(tensor.count):
            sources = _sources(tensor, checkpoint, index)
            if not _fits(tensor, sources):
                name = tensor.source_names(index)[0]
                raise BadCheckpoint(f"{name} does not have the shape that gives {tensor.name}")
            sizes.update((source.name, source.entry.size_bytes) for source in sources)
            if tensor.source_names(index) == tensor.source_names(index + 1):
                break  # all matrices come from the same sources
    return sum(sizes.values())


def _fits(tensor: Tensor, sources: Sequence[Source]) -> bool:
    if tensor.role is Role.VECTOR:
        return sum(source.entry.elements for source in sources) == tensor.n * tensor.k
    if tensor.alternate:
        rows = {source.rows for source in sources}
        padded = ceil_to(sources[0].rows, PANEL_ROWS)
        good = len(sources) == 2 and len(rows) == 1 and 2 * padded == tensor.n
    elif tensor.join is stack_rows:
        good = sum(source.rows for source in sources) == tensor.n
    else:
        return True  # what a join makes is checked when it is made
    return good and all(source.columns == tensor.k for source in sources)


def _sources(tensor: Tensor, checkpoint: Checkpoint, index: int) -> list[Source]:
    names = tensor.source_names(index)
    shapes: Sequence[tuple[int, ...] | None] = tensor.source_shapes or (None,) * len(names)
    return [checkpoint.find(name, shape) for name, shape in zip(names, shapes, strict=True)]


def _overlap(sources: Sequence[Source], start: int, stop: int) -> Iterator[Span]:
    """The parts of the sources that are rows [start, stop) of their stack."""
    above = 0
    for source in sources:
        low, high = max(start - above, 0), min(stop - above, source.rows)
        if low < high:
            yield Span(source, low, high)
        above += source.rows


def _too_large(tensor: Tensor) -> BadCheckpoint:
    return BadCheckpoint(f"{tensor.name} holds values that are too large for its number format")
