"""Pins the weights of experts in place in main memory, so that long prompts copy them from there.

A copy to a GPU runs beside other work only from pinned memory. What is not pinned yet is gathered in a pinned buffer
first, which reads and writes main memory once more than the copy itself. Pinning takes some tenths of a second per
gigabyte, so it is done by a thread that begins with the first long prompt, and rests after each block as long as the
block took: others launch work on the GPU meanwhile, for which the driver has one lock.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from ktcli.engine.device.stream import Stream
from ktcli.errors import DeviceError
from ktcli.threads import Daemon

_BLOCK_BYTES = 64 << 20  # pinned at once: some 20 ms
_LOG = logging.getLogger(__name__)

# The first address of some bytes, and the one behind them.
Span = tuple[int, int]


class PinnedWeights:
    """The weights of experts in main memory, which a thread pins block by block.

    Args:
        spans: the bytes of all experts that are in main memory, in any order.
        owners: what keeps this memory alive.
        streams: those that copy from it.
    Attributes:
        finished: set when nothing more will be pinned.
        wanted: whether `begin` pins anything; false to measure what that gains.
    """

    def __init__(
        self,
        spans: Iterable[Span],
        owners: object,
        streams: Sequence[Stream],
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        self._owners = owners
        self._blocks = list(_blocks(_joined(map(_whole_pages, spans)), block_bytes))
        self._pinned = bytearray(len(self._blocks))
        self._streams = tuple(dict.fromkeys(streams))
        self._stop, self.finished = threading.Event(), threading.Event()
        self.wanted = True
        self._thread: threading.Thread | None = None

    @property
    def size_bytes(self) -> int:
        """The number of bytes of weights in main memory that are pinned so far."""
        pinned = zip(self._blocks, self._pinned, strict=True)
        return sum(last - first for (first, last), there in pinned if there)

    def begin(self) -> None:
        """Starts the thread that pins the weights, unless it was started before."""
        if self._thread is not None or not self._blocks or not self.wanted:
            return
        work = self._blocks, self._pinned, self._streams[0], self._stop, self.finished
        self._thread = Daemon(_pin, *work, name="kt-pin")
        # Called when this object is freed, but before the memory itself is. A process that ends leaves the rest to the
        # system, which is faster.
        weakref.finalize(self, _unpin, self._thread, *work[:4], self._streams).atexit = False
        weakref.finalize(self, _ended, self._thread, self._stop)
        self._thread.start()

    def sources(self, address: int, size_bytes: int) -> list[Tensor] | None:
        """Returns the `size_bytes` bytes of weights at `address` as uint8 tensors in their order, each within one
        pinned block, without copying; None: not all of them are pinned yet.
        """
        found, last = [], address + size_bytes
        while address < last:
            number = bisect.bisect_right(self._blocks, address, key=itemgetter(0)) - 1
            if number < 0 or not self._pinned[number] or self._blocks[number][1] <= address:
                return None
            end = min(last, self._blocks[number][1])
            found.append(_bytes_at(address, end - address))
            address = end
        return found


def _pin(
    blocks: Sequence[Span],
    pinned: bytearray,
    stream: Stream,
    stop: threading.Event,
    finished: threading.Event,
) -> None:
    """Pins block after block until all are, one cannot be, or it is told to stop."""
    done = 0
    try:
        with _set_aside(stream):
            for done, (first, last) in enumerate(blocks):
                start = time.monotonic()
                stream.pin(first, last - first)
                pinned[done] = 1
                if stop.wait(time.monotonic() - start):
                    break
    except (DeviceError, RuntimeError) as error:  # the latter of a device that has failed
        _LOG.info("weights from block %d of %d on stay unpinned: %s", done, len(blocks), error)
    finished.set()


@contextmanager
def _set_aside(stream: Stream) -> Iterator[None]:
    """Pins a block that nobody uses, while others are pinned: where that reaches a limit of the system, as on WSL, it
    is then left for what steps pin later."""
    page = mmap.PAGESIZE
    memory = np.empty(_BLOCK_BYTES + page, np.uint8)
    first = -(-memory.ctypes.data // page) * page
    stream.pin(first, _BLOCK_BYTES)
    try:
        yield
    finally:
        stream.unpin(first)


def _ended(thread: threading.Thread, stop: threading.Event) -> None:
    """Ends the thread, which may be in the middle of a block."""
    stop.set()
    thread.join()


def _unpin(
    thread: threading.Thread,
    blocks: Sequence[Span],
    pinned: bytearray,
    stream: Stream,
    stop: threading.Event,
    streams: Sequence[Stream],
) -> None:
    """Gives pinned memory back, once no work has it any more."""
    _ended(thread, stop)
    for each in streams:
        with suppress(DeviceError):
            each.synchronize()
    for number, (first, _) in enumerate(blocks):
        if pinned[number]:
            stream.unpin(first)


def _whole_pages(span: Span) -> Span:
    """The pages on which some bytes lie: memory is pinned by pages."""
    page = mmap.PAGESIZE
    return span[0] // page * page, -(-span[1] // page) * page


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields spans in ascending order, those as one that touch: no page can be pinned twice."""
    at: Span | None = None
    for first, last in sorted(spans):
        if at is not None and first <= at[1]:
            at = at[0], max(at[1], last)
            continue
        if at is not None:
            yield at
        at = first, last
    if at is not None:
        yield at


def _blocks(spans: Iterable[Span], size_bytes: int) -> Iterator[Span]:
    """Yields spans cut into blocks of at most `size_bytes`."""
    for first, last in spans:
        for at in range(first, last, size_bytes):
            yield at, min(last, at + size_bytes)


def _bytes_at(address: int, size_bytes: int) -> Tensor:
    """The bytes at an address; whoever owns them must outlast the tensor."""
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory))
