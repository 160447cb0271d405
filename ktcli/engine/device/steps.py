"""Steps on a device: decode replays the captured step, a prompt runs as it comes.

A prompt's chunk takes one of two ways through the experts in main memory: short ones let the CPU
compute them, long ones bring them to the device. The way is decided for each chunk by its own length, so
a long prompt's last few tokens go the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.runners import Runner, Streamed, TimedRunner
from ktcli.engine.device.stream import Stream, one_step
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.sequence import pages_for
from ktcli.native import Batch, Run
from ktcli.ops.torch.functions import Rows
from ktcli.planner.memory import PREFILL_CHUNK

# forward(embedded [T, hidden], rows, first output row, runner) -> logits [outputs, vocab]
Forward = Callable[[Tensor, Rows, int, Runner], Tensor]


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """The rule by which long prompts are read.

    Attributes:
        threshold: the fewest tokens of a chunk whose experts come to the device; None: never.
        chunk: the most tokens of such a chunk.
        short: the most tokens of any other chunk; where the CPU has experts, PREFILL_CHUNK is all it takes.
    """

    threshold: int | None
    chunk: int
    short: int = PREFILL_CHUNK

    def streams(self, n_tokens: int) -> bool:
        """Tells whether a chunk of `n_tokens` has its experts brought to the device."""
        return self.threshold is not None and n_tokens >= max(2, self.threshold)

    def chunk_tokens(self, left: int) -> int:
        """The tokens of the next chunk, when `left` are left."""
        long = min(left, self.chunk)
        return long if self.streams(long) else min(left, self.short)


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways in which steps run.

    Attributes:
        decode: the captured step of one token; None: every step runs anew.
        runner: the runner of decode and of short chunks of a prompt.
        streamed: the runner of long ones; None: there are none.
        host: experts in main memory; None: there are none.
    """

    forward: Forward
    decode: DecodeStep | None
    runner: TimedRunner
    streamed: Streamed | None
    host: HostExperts | None
    stream: Stream
    table: Tensor
    long_prompts: LongPrompts


class DeviceSteps:
    """Runs batches on a device, one run after the other.

    Args:
        pages: the entries of a page table.
    """

    def __init__(self, ways: Ways, pages: int) -> None:
        self._ways, self._pages = ways, pages

    def run(self, batch: Batch) -> list[Logits]:
        """The logits of each output row."""
        if len(batch.runs) == 1:
            return self._run(batch.runs[0])
        # What the next run overwrites is kept.
        return [_kept(each) for run in batch.runs for each in self._run(run)]

    def _run(self, run: Run) -> list[Logits]:
        if run.ids.size == 1 and run.first_output == 0 and self._ways.decode is not None:
            return [self._decode(self._ways.decode, run)]
        n = run.ids.size - run.first_output
        rows = self._read(run)
        return [Logits.of(row, run.temperature) for row in rows[len(rows) - n :]]

    def _decode(self, step: DecodeStep, run: Run) -> Logits:
        pages = np.zeros((1, self._pages), dtype=np.int32)
        pages[0, : run.pages.size] = run.pages
        step.run(
            run.ids,
            [run.start],
            pages,
            slots=_slots(run),
            temperature=run.temperature,
            defer=run.defer,
        )
        return step.summary(0, run.temperature)

    def _read(self, run: Run) -> F32Array:
        """Runs a chunk of a prompt, or a token that is not computed by the captured step; returns the logits of its
        outputs, of the last token if it has none."""
        ways, n = self._ways, run.ids.size
        runner = self._runner(n)
        first_output = min(run.first_output, n - 1)  # one at least: operations need a row
        with one_step(ways.stream):
            runner.begin(n, run.defer)
            with ways.stream.running():
                logits = ways.forward(*self._inputs(run), first_output, runner)
                found: F32Array = logits.cpu().numpy()  # waits for all that was given to the stream
            ways.stream.synchronize()
            runner.check()
        return found

    def _runner(self, n_tokens: int) -> Runner:
        streamed = self._ways.streamed if self._ways.long_prompts.streams(n_tokens) else None
        return self._ways.runner if streamed is None else streamed

    def _inputs(self, run: Run) -> tuple[Tensor, Rows]:
        n, device = run.ids.size, self._ways.stream.device
        ids = torch.from_numpy(run.ids).long()
        embedded = self._ways.table[ids].to(device).float()
        positions = torch.arange(run.start, run.start + n, device=device)
        reached = pages_for(run.start + n)
        pages = torch.from_numpy(run.pages[None, :reached].copy()).to(device)
        slots = _slots(run)
        places = None if slots is None else torch.from_numpy(slots).to(device)
        return embedded, Rows(positions, pages, n, places, ids.to(device))


def _slots(run: Run) -> NDArray[np.int64] | None:
    """The states to read (negative: none) and to write, [2, 1]; None: no layer keeps any."""
    return None if run.next_state < 0 else np.array([[run.state], [run.next_state]], dtype=np.int64)


def _kept(logits: Logits) -> Logits:
    arrays = {name: getattr(logits, name).copy() for name in ("values", "peaks", "sums")}
    return logits._replace(**arrays)
