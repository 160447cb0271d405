"""Reads strips while others are encoded: on separate threads, into memory that is reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from ktcli.ops.tensors import ceil_to
from ktcli.threadpool import Threads
from ktcli.weights.stages import Stopwatch
from ktcli.weights.storage import Raw, Read, Reader
from ktcli.weights.strips import Strip

DEPTH = 2  # strips, each read by its own thread
_LINE = 64  # bytes; each read begins at a multiple of it in memory


class Slots:
    """A ring of buffers that are reused, so that a conversion's need is soon reached and never exceeded.

    The memory that `take` returns stays as it is until `count` more were taken.
    """

    def __init__(self, count: int) -> None:
        self._slots = deque([np.empty(0, dtype=np.uint8)] * count)

    def take(self, size_bytes: int) -> Raw:
        """Returns memory of `size_bytes` bytes, uint8, in the next buffer of the ring; its contents are undefined."""
        self._slots.rotate(-1)
        if self._slots[0].size < size_bytes:
            self._slots[0] = np.empty(0, dtype=np.uint8)  # give it back first
            self._slots[0] = np.empty(size_bytes, dtype=np.uint8)
        return self._slots[0][:size_bytes]


class ReadAhead:
    """Reads the bytes of the strips of a checkpoint in advance, in their order.

    Attributes:
        clock: runs while something is read.
        total_bytes: bytes requested so far.
    """

    def __init__(self, checkpoint: Reader) -> None:
        self._checkpoint = checkpoint
        self._memory = Slots(DEPTH + 1)  # the strips that are being read, and the one in use
        self.clock, self.total_bytes = Stopwatch(), 0

    def read(self, strips: Iterator[Strip]) -> Iterator[tuple[Strip, list[list[Raw]]]]:
        """Yields each strip with the bytes that it is made from: for each of its spans, one uint8 array per byte range.
        They are valid until the next strip is asked for.

        Raises:
            BadCheckpoint: a file ended early or the disk failed.
        """
        readers = Threads(DEPTH, "kt-read")
        waiting: deque[tuple[Strip, Future[list[list[Raw]]]]] = deque()
        try:
            for strip in strips:
                wanted = [span.source.storage.reads(span) for span in strip.spans]
                memory = self._memory.take(
                    sum(_aligned(read) for reads in wanted for read in reads)
                )
                self.total_bytes += sum(read.total_bytes for reads in wanted for read in reads)
                waiting.append((strip, readers.submit(self._fill, wanted, memory)))
                if len(waiting) > DEPTH:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            readers.shutdown(cancel_futures=True)

    def _fill(self, wanted: list[Sequence[Read]], memory: Raw) -> list[list[Raw]]:
        """Reads the bytes of all spans of a strip into one block of memory."""
        raws: list[list[Raw]] = [[] for _ in wanted]
        with self.clock.running():
            for reads, into in zip(wanted, raws, strict=True):
                for read in reads:
                    into.append(self._checkpoint.read(read, memory[: read.total_bytes]))
                    memory = memory[_aligned(read) :]
        return raws


def _aligned(read: Read) -> int:
    """The bytes of a read, rounded up so that the next one is aligned."""
    return ceil_to(read.total_bytes, _LINE)
