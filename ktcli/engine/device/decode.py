"""Decode steps of B sequences: static buffers around a captured forward.

A step's inputs lie in pinned memory that nothing else writes: they are filled in, the step is replayed, and the
results are read there once the stream is done. The copies to and from the device are
part of what is captured, so that a step costs one launch. No result is looked at before the end, and
nothing is allocated. A step of fewer sequences than it was captured for is filled up with rows that belong to none:
they use a page and a state of nobody, and choose no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.stream import Stream, device_errors, one_step
from ktcli.engine.logits import Logits
from ktcli.errors import DeviceError, OutOfDeviceMemory
from ktcli.native import BLOCK_COLUMNS, Run
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.summary import Summarize, summarize
from ktcli.planner.device import captured_sizes

# forward(embedded [T, hidden], rows) -> logits [outputs, vocab], on the device
Forward = Callable[[Tensor, Rows], Tensor]

_WARM_UPS = 2  # kernels are compiled and workspaces taken before capture
# The id in a row that belongs to no sequence. In a step of one, which is never filled up, it only warms up: there id 0
# saves the operations that look for such rows.
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decode step.

    Attributes:
        batch: the number of sequences.
        pages: the entries of a page table.
        scratch: the page of rows that belong to no sequence.
        scratch_slot: the state that these rows write; None: no layer keeps states.
        window_scratch: their page of the layers with a window; None: these have no pages of their own.
    """

    batch: int
    pages: int
    vocab: int
    scratch: int
    scratch_slot: int | None = None
    window_scratch: int | None = None


class DecodeStep:
    """The captured step of one token of each sequence.

    Args:
        table: embedding [vocab, hidden], bf16 or f32, in host memory.
        host: experts in main memory; None: there are none.
        captured: whether the forward is captured; otherwise it runs anew in every step.
        summarize: the kernel for what the choice of a token reads of its logits.
    Attributes:
        refused: the reason why the device did not capture it, so that it runs anew after all; "" if it did.
    """

    def __init__(
        self,
        forward: Forward,
        table: Tensor,
        sizes: Sizes,
        stream: Stream,
        host: HostExperts | None,
        *,
        captured: bool = True,
        summarize: Summarize = summarize,
    ) -> None:
        self._summarize = summarize
        self._forward, self._table, self._stream, self._host = forward, table, stream, host
        self._sizes, b, blocks = sizes, sizes.batch, -(-sizes.vocab // BLOCK_COLUMNS)
        self._given = _Pairs(stream)
        self._embedded = self._given.pair((b, table.shape[1]), table.dtype)
        self._ids = self._given.pair((b,), torch.int64)
        self._positions = self._given.pair((b,), torch.int64)
        self._pages = self._given.pair((b, sizes.pages), torch.int32)
        self._windows: _Pair | None = None
        if sizes.window_scratch is not None:
            self._windows = self._given.pair((b, sizes.pages), torch.int32)
        recurrent = sizes.scratch_slot is not None
        self._slots = self._given.pair((2, b), torch.int64) if recurrent else None
        self._temperatures = self._given.pair((b,), torch.float32)
        self._logits = pinned(stream, (b, sizes.vocab), torch.float32)
        self._best = pinned(stream, (b,), torch.int64)
        self._peaks = pinned(stream, (b, blocks), torch.float32)
        self._sums = pinned(stream, (b, blocks), torch.float32)
        self.refused = ""
        self._replay = self._warmed() if captured else self._work

    def run(self, runs: Sequence[Run]) -> None:
        """Computes runs of one token each, as many as it was made for at most; see `summary`.

        Raises:
            DeviceError: the device failed.
            KtError: the CPU's share failed.
        """
        with one_step(self._stream):
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

    def logits(self) -> NDArray[np.float32]:
        """The logits [B, vocab] of the last step, in place."""
        found: NDArray[np.float32] = self._logits.numpy()
        return found

    def summary(self, row: int, temperature: float) -> Logits:
        """The logits of one sequence with their summary, in place."""
        return Logits(
            self._logits[row].numpy(),
            int(self._best[row]),
            self._peaks[row].numpy(),
            self._sums[row].numpy(),
            temperature,
        )

    def _once(self, work: Callable[[], None], runs: Sequence[Run]) -> None:
        if self._host is not None:
            defer = np.zeros(self._sizes.batch, dtype=np.int32)
            defer[: len(runs)] = [run.defer for run in runs]
            self._host.begin(defer.size, defer)
        work()
        if self._host is None:
            self._stream.synchronize()
        else:
            self._stream.sleep()  # all cores are at work, or wait for it
            self._host.check()

    def _warmed(self) -> Callable[[], None]:
        self._fill(())
        for _ in range(_WARM_UPS):
            self._once(self._work, ())
        try:
            return self._stream.capture(self._work)
        except OutOfDeviceMemory:
            raise
        except DeviceError as error:
            self.refused = str(error)
            return self._work

    def _work(self) -> None:
        self._given.to_device()
        with self._stream.running():
            slots = None if self._slots is None else self._slots.device
            ids, live = self._ids.device, None
            if self._sizes.batch > 1:
                ids, live = ids.clamp(min=0), ids >= 0
            windows = None if self._windows is None else self._windows.device
            rows = Rows(
                self._positions.device, self._pages.device, 1, slots, ids, live, windows=windows
            )
            logits = self._forward(self._embedded.device.float(), rows)
            made = logits, *self._summarize(logits, self._temperatures.device)
        kept = self._logits, self._best, self._peaks, self._sums
        for target, source in zip(kept, made, strict=True):
            self._stream.copy(target, source)


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
        """The step for n sequences; None: there is none, as they are too many or the device's memory is full."""
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
    """Writes the page tables of runs, as much of each as has room.

    Args:
        tables: [n, P], perhaps more than runs.
        nobody: the page of all places for which a run has none: no row sees what is there.
    """
    tables[:] = nobody
    for table, pages in zip(tables, given, strict=False):
        assert pages is not None, "the run says nothing of window pages"
        some = pages[: table.size]
        table[: some.size] = np.where(some < 0, nobody, some)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor in pinned memory and its twin on the device."""

    host: Tensor
    device: Tensor


class _Pairs:
    """The tensors that go to the device with every step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.all: list[_Pair] = []

    def pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Pair:
        host = pinned(self._stream, shape, dtype)
        with self._stream.running():
            made = _Pair(host, torch.zeros(shape, dtype=dtype, device=self._stream.device))
        self.all.append(made)
        return made

    def to_device(self) -> None:
        for pair in self.all:
            self._stream.copy(pair.device, pair.host)


def pinned(stream: Stream, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in pinned host memory."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return stream.pinned(size).view(dtype).view(shape)
