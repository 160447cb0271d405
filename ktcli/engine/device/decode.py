"""Decode steps of B sequences: static buffers around a captured forward pass.

A step's inputs lie in pinned memory that nothing else writes: they are filled in, the step is replayed, and the
results are read there once the stream is done. The copies to and from the device are
part of what is captured, so that a step costs one launch. No result is looked at before the end, and
nothing is allocated. A step of fewer sequences than it was captured for is filled up with rows that belong to none:
they use a page and a state of nobody, and choose no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.segments import Border
from ktcli.engine.device.stream import Stream, device_errors, one_step
from ktcli.engine.logits import Logits
from ktcli.errors import DeviceError, OutOfDeviceMemory
from ktcli.native import BLOCK_COLUMNS, Run
from ktcli.ops.torch.functions import Rows, Summarize, summarize
from ktcli.planner.device import captured_sizes
from ktcli.records import dataclass

# forward(embedded [T, hidden], rows) -> logits [outputs, vocab], on the device; of a segment, the residual before it ->
# the residual behind it, or logits behind the last one
Forward = Callable[[Tensor, Rows], Tensor]

# The id in a row that belongs to no sequence. In a step of one, which is never filled up, it only warms up: there id 0
# saves the operations that look for such rows.
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decode step.

    Attributes:
        batch: the number of sequences.
        pages: the entries of a page table.
        width: the columns of a row of logits, or of a hidden row.
        scratch: the page of rows that belong to no sequence.
        scratch_slot: the state that these rows write; None: no layer keeps states.
        window_scratch: their page of the layers with a window; None: these have no pages of their own.
    """

    batch: int
    pages: int
    width: int
    scratch: int
    scratch_slot: int | None = None
    window_scratch: int | None = None


class DecodeStep:
    """A captured decode step for one token of each of B sequences.

    Args:
        forwards: the forward of each segment.
        streams: the stream of each segment.
        table: embedding [vocab, hidden], bf16 or f32, in host memory.
        host: experts in main memory; None: there are none.
        captured: whether the forward is captured; otherwise it runs anew in every step.
        summarize: the kernel for what the choice of a token reads of its logits.
    Attributes:
        refused: the reason why the device did not capture it, so that it runs anew after all; "" if it did.
    """

    def __init__(
        self,
        forwards: Sequence[Forward],
        table: Tensor,
        sizes: Sizes,
        streams: Sequence[Stream],
        host: HostExperts | None,
        *,
        captured: bool = True,
        summarize: Summarize = summarize,
    ) -> None:
        self._summarize = summarize
        self._forwards, self._table, self._streams, self._host = forwards, table, streams, host
        self._borders = [Border(*each) for each in pairwise(streams)]
        self._sizes, b, blocks = sizes, sizes.batch, -(-sizes.width // BLOCK_COLUMNS)
        self._given = _Pairs(streams)
        self._embedded = self._given.pair((b, table.shape[1]), table.dtype, only=0)
        self._ids = self._given.pair((b,), torch.int64)
        self._positions = self._given.pair((b,), torch.int64)
        self._pages = self._given.pair((b, sizes.pages), torch.int32)
        self._windows: _Pair | None = None
        if sizes.window_scratch is not None:
            self._windows = self._given.pair((b, sizes.pages), torch.int32)
        recurrent = sizes.scratch_slot is not None
        self._slots = self._given.pair((2, b), torch.int64) if recurrent else None
        last = len(streams) - 1
        self._temperatures = self._given.pair((b,), torch.float32, only=last)
        stream = streams[last]
        self._logits = pinned(stream, (b, sizes.width), torch.float32)
        self._best = pinned(stream, (b,), torch.int64)
        self._peaks = pinned(stream, (b, blocks), torch.float32)
        self._sums = pinned(stream, (b, blocks), torch.float32)
        self.refused = ""
        self._replay = self._warmed() if captured else self._works()

    def run(self, runs: Sequence[Run]) -> None:
        """Computes one step for runs of one token each, at most as many as the step was made for; `summary` then
        returns the logits of each.

        Raises:
            DeviceError: the device failed.
            KtError: the CPU's share failed.
        """
        with one_step(self._streams):
            self._fill(runs)
            self._once(self._replay, runs)

    def _fill(self, runs: Sequence[Run]) -> None:
        """Writes what a step reads."""
        sizes, n = self._sizes, len(runs)
        ids = self._ids.host.numpy()
        ids[:n], ids[n:] = [run.ids[0] for run in runs], _NOBODY if sizes.batch > 1 else 0
        rows = self._ids.host.clamp(min=0)
        torch.index_select(self._table, 0, rows, out=self._embedded.host)
        positions = self._positions.host.numpy()
        positions[:n], positions[n:] = [run.start for run in runs], 0
        fill_tables(self._pages.host.numpy(), [run.pages for run in runs], sizes.scratch)
        if self._windows is not None and sizes.window_scratch is not None:
            tables = [run.window_pages for run in runs]
            fill_tables(self._windows.host.numpy(), tables, sizes.window_scratch)
        if self._slots is not None:
            slots = self._slots.host.numpy()
            slots[0, :n], slots[0, n:] = [run.state for run in runs], -1
            slots[1, :n], slots[1, n:] = [run.next_state for run in runs], sizes.scratch_slot
        temperatures = self._temperatures.host.numpy()
        temperatures[:n], temperatures[n:] = [run.temperature for run in runs], 0.0

    def summary(self, row: int, temperature: float) -> Logits:
        """Returns the logits of sequence number `row` of the last step, with the greatest value and the sum of
        exponentials of each block of 64, as views of buffers that the next step overwrites. `temperature` is that of
        the sequence's run.
        """
        return Logits(
            self._logits[row].numpy(),
            int(self._best[row]),
            self._peaks[row].numpy(),
            self._sums[row].numpy(),
            temperature,
        )

    def _once(self, works: Sequence[Callable[[], None]], runs: Sequence[Run]) -> None:
        if self._host is not None:
            defer = np.zeros(self._sizes.batch, dtype=np.int32)
            defer[: len(runs)] = [run.defer for run in runs]
            self._host.begin(defer.size, defer)
        self._run(works)
        if self._host is None:
            self._streams[-1].synchronize()
        else:
            self._streams[-1].sleep()  # all cores are at work, or wait for it
            self._host.check()

    def _run(self, works: Sequence[Callable[[], None]]) -> None:
        for number, work in enumerate(works):
            if number:
                self._borders[number - 1].cross()
            work()

    def _warmed(self) -> list[Callable[[], None]]:
        self._fill(())
        works = self._works()
        # Kernels are compiled and workspaces taken before the capture.
        with nullcontext() if self._host is None else self._host.rehearsed():
            self._run(works)
            for stream in self._streams:
                stream.synchronize()
        self._once(works, ())
        try:
            return [stream.capture(work) for stream, work in zip(self._streams, works, strict=True)]
        except OutOfDeviceMemory:
            raise
        except DeviceError as error:
            self.refused = str(error)
            return works

    def _works(self) -> list[Callable[[], None]]:
        """The work of each segment."""
        return [partial(self._work, number) for number in range(len(self._streams))]

    def _work(self, number: int) -> None:
        stream = self._streams[number]
        self._given.to_device(number)
        x = None if number == 0 else self._borders[number - 1].enter()
        with stream.running():
            if x is None:
                x = self._embedded.on(number).float()
            x = self._forwards[number](x, self._rows(number))
        if number < len(self._borders):
            self._borders[number].leave(x)
            return
        with stream.running():
            made = x, *self._summarize(x, self._temperatures.on(number))
        kept = self._logits, self._best, self._peaks, self._sums
        for target, source in zip(kept, made, strict=True):
            stream.copy(target, source)

    def _rows(self, number: int) -> Rows:
        """What operations of a segment read of a step."""
        slots = None if self._slots is None else self._slots.on(number)
        ids, live = self._ids.on(number), None
        if self._sizes.batch > 1:
            ids, live = ids.clamp(min=0), ids >= 0
        windows = None if self._windows is None else self._windows.on(number)
        positions, pages = self._positions.on(number), self._pages.on(number)
        return Rows(positions, pages, 1, slots, ids, live, windows=windows)


class DecodeSteps:
    """The captured steps of an engine, by the number of their sequences. Each is made when it is first needed; that of
    one sequence at once.

    Args:
        make: makes the step of so many sequences.
        most: the most sequences that are to be decoded together.
    """

    def __init__(self, make: Callable[[int], DecodeStep], most: int) -> None:
        self._make, self._sizes = make, captured_sizes(most)
        self._made: dict[int, DecodeStep | None] = {1: make(1)}

    def of(self, n: int) -> DecodeStep | None:
        """Returns the captured decode step that has room for n sequences, which is captured on first use; None: n is
        too large or the device's memory is full.
        """
        size = next((size for size in self._sizes if size >= n), None)
        if size is None:
            return None
        if size not in self._made:
            try:
                with device_errors(f"preparing steps of {size} answers"):
                    self._made[size] = self._make(size)
            except OutOfDeviceMemory:
                self._made[size] = None
        return self._made[size]


def fill_tables(
    tables: NDArray[np.int32], given: Sequence[NDArray[np.int32] | None], nobody: int = 0
) -> None:
    """Writes each run's table of KV-cache page numbers into its row of `tables`, cut to the row's length.

    Args:
        tables: [n, P], perhaps more rows than runs.
        given: the tables of the runs, in which negative numbers stand for no page.
        nobody: the page number written where a run has no page; no row reads that page's contents.
    """
    tables[:] = nobody
    for table, pages in zip(tables, given, strict=False):
        assert pages is not None, "the run has no window pages"
        some = pages[: table.size]
        table[: some.size] = np.where(some < 0, nobody, some)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor in pinned memory, and its twin on each device that reads it."""

    host: Tensor
    devices: dict[int, Tensor]

    def on(self, number: int) -> Tensor:
        """The twin of a segment."""
        return self.devices[number]


class _Pairs:
    """The tensors that go to the devices with every step."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self.all: list[_Pair] = []

    def pair(self, shape: tuple[int, ...], dtype: torch.dtype, only: int | None = None) -> _Pair:
        """Makes a pair for all segments, or for one."""
        host, devices = pinned(self._streams[0], shape, dtype), {}
        for number, stream in enumerate(self._streams):
            if only is None or number == only:
                with stream.running():
                    devices[number] = torch.zeros(shape, dtype=dtype, device=stream.device)
        self.all.append(_Pair(host, devices))
        return self.all[-1]

    def to_device(self, number: int) -> None:
        """Copies what a segment reads."""
        for pair in self.all:
            if number in pair.devices:
                self._streams[number].copy(pair.devices[number], pair.host)


def pinned(stream: Stream, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a new, uninitialized tensor of this shape and dtype in pinned host memory of the stream."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return stream.pinned(size).view(dtype).view(shape)
