"""The steps of a session on a device: decode replays the captured step, a prompt runs as it comes.

A prompt's chunk takes one of two ways through the experts in main memory: short ones let the CPU
compute them, long ones bring them to the device. Which is decided for each chunk by its own length, so
a long prompt's last few tokens go the short way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.gpu.decode import DecodeStep
from ktcli.engine.gpu.experts import HostExperts
from ktcli.engine.gpu.runners import Coupled, OnDemand, Streamed
from ktcli.engine.gpu.stream import Stream
from ktcli.engine.kvcache import pages_for
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.session import Chunk
from ktcli.layers.gpu.functions import Rows
from ktcli.planner.memory import PREFILL_CHUNK

Runner = Coupled | Streamed | OnDemand
# forward(embedded [T, hidden], rows, first output row, runner) -> logits [outputs, vocab]
Forward = Callable[[Tensor, Rows, int, Runner], Tensor]


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """How long prompts are read.

    Attributes:
        threshold: tokens of a chunk from which its experts come to the device; None: never.
        chunk: tokens of such a chunk, at most.
    """

    threshold: int | None
    chunk: int

    def chunk_tokens(self, left: int) -> int:
        """Of the next chunk, when so many tokens are left."""
        streams = self.threshold is not None and left >= self.threshold
        return min(left, self.chunk if streams else PREFILL_CHUNK)


@dataclass(frozen=True, slots=True)
class Ways:
    """How steps run; shared by the sessions of an engine, which take turns.

    Attributes:
        decode: the captured step of one token; None: every step runs anew.
        runner: of decode and of short chunks of a prompt.
        streamed: of long ones; None: there are none.
        host: experts in main memory; None: there are none.
    """

    forward: Forward
    decode: DecodeStep | None
    runner: Coupled | OnDemand
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
        pages: int32, of the session: page of each run of 64 positions.
    """

    def __init__(self, ways: Ways, pages: NDArray[np.int32]) -> None:
        self._ways, self._pages = ways, pages
        self._outputs: F32Array = np.empty((0, ways.vocab), dtype=np.float32)
        # Nothing here refers to this object itself: its pages go back as soon as nobody has it.
        self._last: Callable[[float], Logits] = partial(Logits.of, self._outputs)

    @property
    def vocab(self) -> int:
        return self._ways.vocab

    @property
    def max_outputs(self) -> int:
        return self._ways.max_outputs

    def chunk_tokens(self, left: int) -> int:
        return self._ways.long_prompts.chunk_tokens(left)

    def run(self, chunk: Chunk) -> None:
        if chunk.ids.size == 1 and chunk.first_output == 0 and self._ways.decode is not None:
            self._decode(self._ways.decode, chunk)
        else:
            self._read(chunk)

    def last(self, temperature: float) -> Logits:
        return self._last(temperature)

    def logits(self, n: int) -> F32Array:
        return self._outputs[:n]

    def _decode(self, step: DecodeStep, chunk: Chunk) -> None:
        temperature = chunk.temperature
        step.run(
            chunk.ids, [chunk.start], self._pages[None], temperature=temperature, defer=chunk.defer
        )
        self._outputs = step.logits()
        self._last = partial(step.summary, 0)

    def _read(self, chunk: Chunk) -> None:
        """A chunk of a prompt, or a token whose neighbours are computed one phase after the other."""
        ways, n = self._ways, chunk.ids.size
        runner = self._runner(n)
        runner.begin(n, chunk.defer)
        first_output = min(chunk.first_output, n - 1)  # one at least: operations need a row
        with ways.stream.running():
            logits = ways.forward(*self._inputs(chunk), first_output, runner)
            self._outputs = logits.cpu().numpy()  # waits for all that was given to the stream
        ways.stream.synchronize()
        runner.check()
        self._last = partial(Logits.of, self._outputs[-1])

    def _runner(self, n_tokens: int) -> Runner:
        threshold, streamed = self._ways.long_prompts.threshold, self._ways.streamed
        if threshold is None or streamed is None or n_tokens < max(2, threshold):
            return self._ways.runner
        return streamed

    def _inputs(self, chunk: Chunk) -> tuple[Tensor, Rows]:
        n, device = chunk.ids.size, self._ways.stream.device
        ids = torch.from_numpy(chunk.ids).long()
        embedded = self._ways.table[ids].to(device).float()
        positions = torch.arange(chunk.start, chunk.start + n, device=device)
        reached = pages_for(chunk.start + n)
        pages = torch.from_numpy(self._pages[None, :reached]).to(device)
        return embedded, Rows(positions, pages, n)
