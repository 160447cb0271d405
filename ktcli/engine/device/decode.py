"""One decode step of B sequences: static buffers around a captured forward.

A step's inputs lie in pinned memory that nothing else writes: they are filled in, the step is replayed, and the
results are read there once the stream is done. The copies to and from the device are
part of what is captured, so that a step costs one launch. No result is looked at before the end, and
nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.stream import Stream, one_step
from ktcli.engine.logits import Logits
from ktcli.native import BLOCK_COLUMNS
from ktcli.ops.torch.functions import Rows

# forward(embedded [T, hidden], rows) -> logits [outputs, vocab], on the device
Forward = Callable[[Tensor, Rows], Tensor]

_WARM_UPS = 2  # kernels are compiled and workspaces taken before capture


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decode step.

    Attributes:
        batch: the number of sequences.
        pages: the entries of a page table.
        recurrent: whether some layers keep states.
    """

    batch: int
    pages: int
    vocab: int
    recurrent: bool = False


class DecodeStep:
    """The captured step of one token of each sequence.

    Args:
        table: embedding [vocab, hidden], bf16 or f32, in host memory.
        host: experts in main memory; None: there are none.
        captured: whether the forward is captured; otherwise it runs anew in every step.
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
    ) -> None:
        self._forward, self._table, self._stream, self._host = forward, table, stream, host
        b, blocks = sizes.batch, -(-sizes.vocab // BLOCK_COLUMNS)
        self._given = _Pairs(stream)
        self._embedded = self._given.pair((b, table.shape[1]), table.dtype)
        self._ids = self._given.pair((b,), torch.int64)
        self._positions = self._given.pair((b,), torch.int64)
        self._pages = self._given.pair((b, sizes.pages), torch.int32)
        self._slots = self._given.pair((2, b), torch.int64) if sizes.recurrent else None
        self._temperature = self._given.pair((1,), torch.float32)
        self._results = _Pairs(stream)
        self._logits = self._results.pair((b, sizes.vocab), torch.float32)
        self._best = self._results.pair((b,), torch.int64)
        self._peaks = self._results.pair((b, blocks), torch.float32)
        self._sums = self._results.pair((b, blocks), torch.float32)
        self._replay = self._warmed() if captured else self._work

    def run(
        self,
        ids: NDArray[np.int32],
        positions: Sequence[int],
        pages: NDArray[np.int32],
        *,
        slots: NDArray[np.int64] | None = None,
        temperature: float = 0.0,
        defer: int = 0,
    ) -> None:
        """Computes one token of each sequence.

        Args:
            ids: the ids [B].
            positions: the position of each.
            pages: the page tables [B, P], page 0 where there is none.
            slots: the states to read (negative: none) and to write, [2, B]; where some layers keep states.
        Raises:
            DeviceError: the device failed.
            KtError: the CPU's share failed.
        """
        with one_step(self._stream):
            self._ids.host.copy_(torch.from_numpy(ids))
            torch.index_select(self._table, 0, self._ids.host, out=self._embedded.host)
            self._positions.host.copy_(torch.tensor(positions))
            self._pages.host.copy_(torch.from_numpy(pages))
            if self._slots is not None:
                assert slots is not None
                self._slots.host.copy_(torch.from_numpy(slots))
            self._temperature.host.fill_(temperature)
            self._once(self._replay, defer)

    def logits(self) -> NDArray[np.float32]:
        """The logits [B, vocab] of the last step, in place."""
        found: NDArray[np.float32] = self._logits.host.numpy()
        return found

    def summary(self, row: int, temperature: float) -> Logits:
        """The logits of one sequence with their summary, in place."""
        return Logits(
            self._logits.host[row].numpy(),
            int(self._best.host[row]),
            self._peaks.host[row].numpy(),
            self._sums.host[row].numpy(),
            temperature,
        )

    def _once(self, work: Callable[[], None], defer: int) -> None:
        if self._host is not None:
            self._host.begin(self._positions.host.shape[0], defer)
        work()
        self._stream.synchronize()
        if self._host is not None:
            self._host.check()

    def _warmed(self) -> Callable[[], None]:
        for pair in self._given.all:
            pair.host.zero_()
        for _ in range(_WARM_UPS):
            self._once(self._work, 0)
        return self._stream.capture(self._work)

    def _work(self) -> None:
        self._given.to_device()
        with self._stream.running():
            slots = None if self._slots is None else self._slots.device
            of = self._positions.device, self._pages.device
            rows = Rows(*of, 1, slots, self._ids.device)
            logits = self._forward(self._embedded.device.float(), rows)
            self._logits.device.copy_(logits)
            best, peaks, sums = summarize(logits, self._temperature.device)
            self._best.device.copy_(best)
            self._peaks.device.copy_(peaks)
            self._sums.device.copy_(sums)
        self._results.to_host()


def summarize(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The `best` [B], peaks and sums [B, blocks] (see `Logits`) of logits [B, vocab]; sums are 0 at temperature 0."""
    vocab = logits.shape[1]
    short = -vocab % BLOCK_COLUMNS
    padded = torch.nn.functional.pad(logits, (0, short), value=-torch.inf)
    blocks = padded.view(logits.shape[0], -1, BLOCK_COLUMNS)
    peaks = blocks.amax(2)
    base = torch.where(peaks.isfinite(), peaks, 0.0)
    weights = ((blocks - base[:, :, None]) / temperature.clamp_min(1e-30)).exp()
    sums = torch.where(temperature > 0, weights.sum(2), 0.0)
    return logits.argmax(1), torch.where(peaks.isnan(), torch.inf, peaks), sums


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor in pinned memory and its twin on the device."""

    host: Tensor
    device: Tensor


class _Pairs:
    """The tensors that go to the device, or come from it, with every step."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.all: list[_Pair] = []

    def pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Pair:
        size = torch.Size(shape).numel() * dtype.itemsize
        host = self._stream.pinned(size).view(dtype).view(shape)
        with self._stream.running():
            made = _Pair(host, torch.zeros(shape, dtype=dtype, device=self._stream.device))
        self.all.append(made)
        return made

    def to_device(self) -> None:
        for pair in self.all:
            self._stream.copy(pair.device, pair.host)

    def to_host(self) -> None:
        for pair in self.all:
            self._stream.copy(pair.host, pair.device)
