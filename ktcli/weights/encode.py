"""Encodes the tensors of a checkpoint as the stored bytes of a model's tensors, in bounded memory.

Strips are read ahead by threads of their own while the pool encodes the one before, and come out in the order in which
their bytes are stored. Packed tensors are never decoded as a whole: the library takes the rows of a panel from what was
read, in the type they have there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint
from ktcli.native import BadNumber, Format, Gathered, Numbers, PackError, Pool, packed_bytes
from ktcli.ops.tensors import Role, Tensor
from ktcli.weights.columns import Factors, suffers
from ktcli.weights.importance import UNKNOWN, Importance
from ktcli.weights.read_ahead import ReadAhead, Slots
from ktcli.weights.recipe import BF16_BYTES, Recipe, TensorKind, format_of, kind_of, plain_bytes
from ktcli.weights.stages import Stages, Stopwatch
from ktcli.weights.storage import Matrix, Raw, Reader
from ktcli.weights.strips import Strip, cut, vector_of

LEAST_IMPORTANCE = 2.0**-20  # the smallest that kt_pack takes; its inverse is the largest

Raws = Sequence[Sequence[Raw]]  # the bytes that each span of a strip reads


class Encoder:
    """Encodes the tensors of one checkpoint by one recipe.

    Attributes:
        sums: the errors of what was packed since the caller last cleared them, by kind of tensor.
        importance: by it a column's errors count, see kt_pack.
    """

    def __init__(
        self,
        checkpoint: Reader,
        recipe: Recipe,
        pool: Pool,
        importance: Importance = UNKNOWN,
    ) -> None:
        """Makes an encoder."""
        self._checkpoint, self._recipe, self._pool = checkpoint, recipe, pool
        self.importance = importance
        self._ahead = ReadAhead(checkpoint)
        # The part that is being written, and the part that is being encoded.
        self._parts: Slots | _InOrder = Slots(2)
        self._factors = Factors(checkpoint, pool)
        self._clock = Stopwatch()
        self.sums: dict[TensorKind, PackError] = {}

    def encode(self, tensors: Sequence[Tensor]) -> Iterator[NDArray[np.uint8]]:
        """Yields the bytes of `tensors` as a pack stores them, in order, cut into uint8 arrays.

        An array's memory is reused when the second array after it is asked for.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for its format, or a file cannot be read.
        """
        strips = (strip for tensor in tensors for strip in cut(tensor, self._checkpoint))
        for strip, raws in self._ahead.read(strips):
            with self._clock.running():
                part = self._part(strip, raws)
            yield part

    def encode_into(self, tensor: Tensor, memory: NDArray[np.uint8]) -> None:
        """Writes the bytes of a tensor, as a pack stores them, to the beginning of `memory`. Raises BadCheckpoint as
        `encode` does."""
        parts, self._parts = self._parts, _InOrder(memory)
        try:
            for part in self.encode([tensor]):
                if tensor.role is Role.VECTOR:  # whose bytes are not taken from `_parts`
                    self._parts.take(part.size)[:] = part
        finally:
            self._parts = parts

    def stages(self, seconds: float, writing: float) -> Stages:
        """Returns the seconds for which reading, encoding and writing were busy in the conversion so far, with the
        bytes read.

        Args:
            seconds: the time that the whole conversion took.
            writing: the seconds for which encoded bytes were being written.
        """
        read, encode = self._ahead.clock.seconds, self._clock.seconds
        return Stages(self._ahead.total_bytes, self._pool.threads, seconds, read, encode, writing)

    def _part(self, strip: Strip, raws: Raws) -> Raw:
        """The stored bytes of a strip."""
        if strip.tensor.role is Role.VECTOR:
            return self._vector(strip, raws)
        assert not any(rows.stored.plus for rows in strip.rows), "only vectors are added to"
        fmt = format_of(strip.tensor, self._recipe)
        sources = tuple(self._numbers(strip, span, raw) for span, raw in enumerate(raws))
        gathered = Gathered(sources, strip.map, strip.tensor.k)
        try:
            if fmt is None:
                return self._table(gathered, plain_bytes(strip.tensor, self._recipe))
            scales = self._kept(fmt, strip, raws, gathered.rows)
            return self._packed(strip, fmt, gathered, scales)
        except BadNumber as error:
            if error.is_finite:
                raise _too_large(strip.tensor) from None
            source = strip.spans[gathered.rows[error.row, 0]].source
            raise self._checkpoint.refusal(source, error) from None

    def _numbers(self, strip: Strip, which: int, raws: Sequence[Raw]) -> Numbers:
        """The numbers of a span, transposed where the model says that they lie so."""
        numbers = self._checkpoint.numbers(self._pool, strip.spans[which], raws)
        if not strip.is_transposed(which):
            return numbers
        if not numbers.is_plain:  # rows of codes and blocks cannot be read across
            values = self._checkpoint.decode(self._pool, strip.spans[which], raws)
            numbers = Numbers.of(values)
        return numbers.transpose

    def _vector(self, strip: Strip, raws: Raws) -> Raw:
        """The f32 numbers of a vector, with the factors that it takes over."""
        pairs = zip(strip.spans, raws, strict=True)
        values = [self._checkpoint.decode(self._pool, span, raw) for span, raw in pairs]
        vector, factors = vector_of(strip, values), self._factors.of_vector(strip.tensor.name)
        if factors is not None:
            with np.errstate(over="ignore"):  # refused in the next line
                vector = vector * factors
            if not np.isfinite(vector).all():
                raise _too_large(strip.tensor)
        return np.ascontiguousarray(vector).view(np.uint8)

    def _table(self, gathered: Gathered, each: int) -> Raw:
        """The stored bytes of plain rows: numbers of `each` bytes, bf16 or f32."""
        n, k = gathered.shape
        part = self._parts.take(each * n * k)
        dtype = np.uint16 if each == BF16_BYTES else np.float32
        self._pool.decode(gathered, part.view(dtype).reshape(n, k))
        return part

    def _packed(self, strip: Strip, fmt: Format, gathered: Gathered, scales: Matrix | None) -> Raw:
        """The packed bytes of a strip; adds its errors to `sums`."""
        tensor = strip.tensor
        if tensor.gain is not None and scales is None and suffers(fmt):
            divisors = self._factors.of_columns(tensor, tensor.gain)
            gathered = Gathered(gathered.sources, gathered.rows, gathered.k, divisors)
        part, counts = self._parts.take(packed_bytes(fmt, *gathered.shape)), self._counts(strip)
        sums = self._pool.pack(fmt, gathered, part, scales=scales, importance=counts)
        if not all(map(math.isfinite, sums)):
            raise _too_large(tensor)
        kind = kind_of(tensor)
        assert kind is not None
        before = self.sums.get(kind, PackError(0.0, 0.0, 0.0, 0.0, 0.0))
        self.sums[kind] = PackError(*map(sum, zip(before, sums, strict=True)))
        return part

    def _kept(
        self, fmt: Format, strip: Strip, raws: Raws, rows: NDArray[np.int32]
    ) -> Matrix | None:
        """The scales [n, groups] of the rows that `fmt` holds exactly with them, 0 for others; None: there are none."""
        scales: Matrix | None = None
        for which, (span, raw) in enumerate(zip(strip.spans, raws, strict=True)):
            across = strip.is_transposed(which)
            kept = None if across else span.source.storage.kept(self._pool, span, raw, fmt)
            if kept is None:
                continue
            if scales is None:
                scales = np.zeros((len(rows), kept.shape[1]), np.float32)
            mine = rows[:, 0] == which
            scales[mine] = kept[rows[mine, 1]]
        return scales

    def _counts(self, strip: Strip) -> Matrix | None:
        """The importance [k] of a strip's columns after they were divided by their factors; None: there is none."""
        counts = self.importance.row(strip.tensor.name, strip.index)
        if counts is None:
            return None
        gain = strip.tensor.gain
        factors = None if gain is None else self._factors.of_vector(gain.name)
        if factors is None:
            return counts
        clipped: Matrix = np.clip(counts * factors**2, LEAST_IMPORTANCE, 1 / LEAST_IMPORTANCE)
        return clipped


class _InOrder:
    """Parts of one block of memory, one behind the other."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory

    def take(self, size_bytes: int) -> Raw:
        """Returns the next `size_bytes` bytes."""
        found, self._memory = self._memory[:size_bytes], self._memory[size_bytes:]
        return found


def _too_large(tensor: Tensor) -> BadCheckpoint:
    return BadCheckpoint(f"{tensor.name} holds values that are too large for its number format")
