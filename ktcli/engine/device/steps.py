"""The steps of a session on a device: decode replays the captured step, a prompt runs as it comes.

A prompt's chunk takes one of two ways through the experts in main memory: short ones let the CPU
compute them, long ones bring them to the device. The way is decided for each chunk by its own length, so
a long prompt's last few tokens go the short way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.decode import DecodeStep
from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.runners import Runner, Streamed, TimedRunner
from ktcli.engine.device.stream import Stream, one_step
from ktcli.engine.kvcache import pages_for
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.session import Chunk
from ktcli.engine.states import StateSlots
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
    """The ways in which steps run; shared by the sessions of an engine, which take turns.

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
    vocab: int
    long_prompts: LongPrompts
    max_outputs: int


class DeviceSteps:
    """Runs chunks on a device.

    Args:
        pages: the session's page of each run of 64 positions, int32.
        slots: the slots of its states; (): no layer keeps any.
    """

    def __init__(self, ways: Ways, pages: NDArray[np.int32], slots: Sequence[int] = ()) -> None:
        self._ways, self._pages = ways, pages
        self._slots = np.array([*slots, -1], dtype=np.int64)  # the last is read where there is none
        self._states = StateSlots(len(slots)) if slots else None
        self._outputs: F32Array = np.empty((0, ways.vocab), dtype=np.float32)
        self._decoded: DecodeStep | None = None  # what the last chunk's logits are summarized by

    @property
    def vocab(self) -> int:
        return self._ways.vocab

    @property
    def recurrent(self) -> bool:
        return self._states is not None

    @property
    def max_outputs(self) -> int:
        return self._ways.max_outputs

    def chunk_tokens(self, left: int) -> int:
        return self._ways.long_prompts.chunk_tokens(left)

    def truncate(self, position: int) -> int:
        return position if self._states is None else self._states.truncate(position)

    def run(self, chunk: Chunk) -> None:
        if self._states is None:
            self._run(chunk, None)
            return
        source, target = self._states.begin(chunk.start)
        places = [-1 if source is None else source, target]
        self._run(chunk, self._slots[places][:, None])
        n = chunk.ids.size
        self._states.end(target, chunk.start + n, snapshot=n > 1 and not chunk.tried)

    def _run(self, chunk: Chunk, slots: NDArray[np.int64] | None) -> None:
        """Runs a chunk; slots [2, 1]: the state to read and the one to write."""
        if chunk.ids.size == 1 and chunk.first_output == 0 and self._ways.decode is not None:
            self._decode(self._ways.decode, chunk, slots)
        else:
            self._read(chunk, slots)

    def last(self, temperature: float) -> Logits:
        if self._decoded is None:
            return Logits.of(self._outputs[-1], temperature)
        return self._decoded.summary(0, temperature)

    def rows(self, n: int, temperature: float) -> list[Logits]:
        if n == 1:
            return [self.last(temperature)]
        return [Logits.of(row, temperature) for row in self._outputs[:n]]

    def logits(self, n: int) -> F32Array:
        return self._outputs[:n]

    def _decode(self, step: DecodeStep, chunk: Chunk, slots: NDArray[np.int64] | None) -> None:
        step.run(
            chunk.ids,
            [chunk.start],
            self._pages[None],
            slots=slots,
            temperature=chunk.temperature,
            defer=chunk.defer,
        )
        self._outputs, self._decoded = step.logits(), step

    def _read(self, chunk: Chunk, slots: NDArray[np.int64] | None) -> None:
        """Runs a chunk of a prompt, or a token that is not computed by the captured step."""
        ways, n = self._ways, chunk.ids.size
        runner = self._runner(n)
        first_output = min(chunk.first_output, n - 1)  # one at least: operations need a row
        with one_step(ways.stream):
            runner.begin(n, chunk.defer)
            with ways.stream.running():
                logits = ways.forward(*self._inputs(chunk, slots), first_output, runner)
                self._outputs = logits.cpu().numpy()  # waits for all that was given to the stream
            ways.stream.synchronize()
            runner.check()
        self._decoded = None

    def _runner(self, n_tokens: int) -> Runner:
        streamed = self._ways.streamed if self._ways.long_prompts.streams(n_tokens) else None
        return self._ways.runner if streamed is None else streamed

    def _inputs(self, chunk: Chunk, slots: NDArray[np.int64] | None) -> tuple[Tensor, Rows]:
        n, device = chunk.ids.size, self._ways.stream.device
        ids = torch.from_numpy(chunk.ids).long()
        embedded = self._ways.table[ids].to(device).float()
        positions = torch.arange(chunk.start, chunk.start + n, device=device)
        reached = pages_for(chunk.start + n)
        pages = torch.from_numpy(self._pages[None, :reached]).to(device)
        places = None if slots is None else torch.from_numpy(slots).to(device)
        return embedded, Rows(positions, pages, n, places, ids.to(device))
