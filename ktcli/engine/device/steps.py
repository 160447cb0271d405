"""Runs steps on a device: decode replays a captured step; steps that read prompts run without capture.

A prompt takes one of two ways through the experts in main memory: short chunks let the CPU compute them, long ones
bring them to the device. The way is decided for each step by its own length, so a long prompt's last few tokens go the
short way. What runs, captured or not, is the forward of a segment of layers, which counts the experts they choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ktcli.engine.device.decode import DecodeSteps, fill_tables
from ktcli.engine.device.experts import Depths, HostExperts
from ktcli.engine.device.passes import LongPrompts, Pass, is_single, passes
from ktcli.engine.device.runners import Runner, Streamed, TimedRunner
from ktcli.engine.device.segments import brought
from ktcli.engine.device.stream import Stream, one_step
from ktcli.engine.logits import F32Array, Logits
from ktcli.engine.pagetable import pages_for
from ktcli.models import Model
from ktcli.native import Batch, Run
from ktcli.ops.torch.backend import StepInputs, Weights
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merging import backend_of
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class SegmentForward:
    """The forward of a segment, without a reference to the engine: device memory is freed with its last user.

    Attributes:
        caches: the pages of each layer.
        chosen: the counts of chosen experts, int64 [MoE layers of the segment, E].
        states: the states of each layer.
        windowed: the layers whose pages are window pages.
        layers: the layers of the segment.
        routed: the number of layers with experts before it.
    """

    model: Model
    weights: Weights
    caches: Sequence[Tensor]
    kernels: Kernels
    chosen: Tensor
    states: Sequence[Tensor] = ()
    windowed: frozenset[int] = frozenset()
    layers: range = range(0)
    routed: int = 0

    def __call__(
        self, embedded: Tensor, parts: Sequence[Rows], outputs: Tensor | None, runner: Runner
    ) -> Tensor:
        """The residual behind the segment, or the logits [outputs, vocab], of embedded rows or the residual before it,
        see `StepInputs`; counts the experts they chose."""
        inputs = StepInputs(
            embedded, parts, self.caches, outputs, self.states, self.windowed, self.routed
        )
        first, last = self.layers.start, self.layers.stop
        x = embedded if first else None
        backend = backend_of(self.weights, inputs, self.kernels, runner)
        with torch.inference_mode():  # nothing is noted for a way back: that costs each launch
            logits: Tensor = backend.run(lambda b: self.model.part(b, x, first, last))
            if backend.routings:
                count(self.chosen, [ids for ids, _ in backend.routings])
        return logits


def count(chosen: Tensor, ids: Sequence[Tensor]) -> None:
    """Adds to chosen [layers, experts] the number of times that each layer's ids [T, top_k] name each expert;
    negative ids name none."""
    layers, experts = chosen.shape
    first = torch.arange(0, layers * experts, experts, device=chosen.device)
    numbers = torch.stack(list(ids)).long()
    places = (numbers.clamp(min=0) + first[:, None, None]).flatten()
    chosen.view(-1).index_add_(0, places, (numbers >= 0).long().flatten())


@dataclass(frozen=True, slots=True)
class Ways:
    """The forwards, captured steps and runners by which steps run.

    Attributes:
        forwards: the forward of each segment.
        decode: the captured steps; None: every step runs anew.
        runner: the runner of decode and of short chunks of prompts.
        streamed: the runner of long ones; None: there are none.
        host: experts in main memory; None: there are none.
    """

    forwards: Sequence[SegmentForward]
    decode: DecodeSteps | None
    runner: TimedRunner
    streamed: Streamed | None
    host: HostExperts | None
    streams: Sequence[Stream]
    table: Tensor
    long_prompts: LongPrompts


class DeviceSteps:
    """Runs batches on a device: decode by a captured step, everything else uncaptured."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways

    def run(self, batch: Batch) -> list[Logits]:
        """Computes one step for a batch of runs; returns the logits of each row that gives some, in the order of the
        rows, valid until the next step.
        """
        found: list[list[Logits]] = [[] for _ in batch.runs]
        host, rule = self._ways.host, self._ways.long_prompts
        most = rule.short if host is None else min(rule.short, host.shape.max_tokens)
        for each in passes(batch.runs, rule, most):
            for (number, _), logits in zip(each.runs, self._logits(each), strict=True):
                found[number] += logits
        return [logits for of_run in found for logits in of_run]

    def _logits(self, some: Pass) -> Iterator[list[Logits]]:
        """Computes a pass; yields the logits of each of its runs."""
        decode, runs = self._ways.decode, [run for _, run in some.runs]
        if decode is not None and some.single:
            step = decode.of(len(runs))
            if step is not None:
                step.run(runs)
                for row, run in enumerate(runs):
                    wanted = run.first_output == 0
                    yield [step.summary(row, run.temperature)] if wanted else []
                return
        rows = iter(self._anew(runs, some.streamed))
        for run in runs:
            outputs = range(run.first_output, run.ids.size)
            yield [Logits.of(next(rows), run.temperature) for _ in outputs]

    def _anew(self, runs: Sequence[Run], streamed: bool) -> F32Array:
        """Computes runs in a step that is not captured; returns the logits of their outputs, of some row if there are
        none."""
        ways, n = self._ways, sum(run.ids.size for run in runs)
        runner = ways.streamed if streamed and ways.streamed is not None else ways.runner
        with one_step(ways.streams):
            runner.begin(n, depths(runs))
            logits = self._through(runs, runner)
            last = ways.streams[-1]
            with last.running():
                last.sleep()
                found: F32Array = logits.cpu().numpy()
            runner.check()
        return found

    def _through(self, runs: Sequence[Run], runner: Runner) -> Tensor:
        """Computes runs segment by segment; returns the logits of their outputs."""
        ids = torch.from_numpy(np.concatenate([run.ids for run in runs])).long()
        x, before = self._ways.table[ids], None
        for stream, forward in zip(self._ways.streams, self._ways.forwards, strict=True):
            if before is not None:
                x = brought(x, before, stream)
            with stream.running():
                if before is None:
                    x = x.to(stream.device).float()
                parts, outputs = tuple(parts_of(runs, stream.device)), _outputs(runs, stream.device)
                x, before = forward(x, parts, outputs, runner), stream
        return x


def _outputs(runs: Sequence[Run], device: torch.device) -> Tensor | None:
    """The rows that give logits; None: all. One at least: operations need a row."""
    gives = np.concatenate([np.arange(run.ids.size) >= run.first_output for run in runs])
    if not gives.any():
        gives[-1] = True
    return None if gives.all() else torch.from_numpy(np.flatnonzero(gives)).to(device)


def depths(runs: Sequence[Run]) -> Depths:
    """Returns the number of experts that each row, a token of the runs, may defer, int32 [rows]."""
    each = np.array([run.defer for run in runs], dtype=np.int32)
    return np.repeat(each, [run.ids.size for run in runs])


def parts_of(runs: Sequence[Run], device: torch.device) -> Iterator[Rows]:
    """Yields `Rows`, what operations read of a step's rows (positions, KV-cache pages and states, on the device), in
    parts: consecutive `is_single` runs form one part, each other run is a part by itself.
    """
    for single, some in groupby(runs, key=is_single):
        for group in [list(some)] if single else [[run] for run in some]:
            yield _rows(group, device)


def _rows(runs: Sequence[Run], device: torch.device) -> Rows:
    """The rows of runs of equal length."""
    n = runs[0].ids.size
    positions = np.concatenate([np.arange(run.start, run.start + n) for run in runs])
    shape = len(runs), max(pages_for(run.start + n) for run in runs)
    pages, windows = np.zeros(shape, dtype=np.int32), None
    fill_tables(pages, [run.pages for run in runs])
    if runs[0].window_pages is not None:
        windows = np.zeros(shape, dtype=np.int32)
        fill_tables(windows, [run.window_pages for run in runs])
    ids = torch.from_numpy(np.concatenate([run.ids for run in runs])).long()
    slots = None
    if runs[0].next_state >= 0:
        both = np.array([[run.state for run in runs], [run.next_state for run in runs]])
        slots = torch.from_numpy(both).to(device)
    chunk = runs[0].chunk
    return Rows(
        torch.from_numpy(positions).to(device),
        torch.from_numpy(pages).to(device),
        n,
        slots,
        ids.to(device),
        chunk=0 if chunk is None else chunk[1],
        windows=None if windows is None else torch.from_numpy(windows).to(device),
        start=runs[0].start if len(runs) == 1 else None,
        absorbed=_absorbed(runs[0]),
    )


def _absorbed(run: Run) -> tuple[tuple[int, int], ...]:
    """The (first, end) rows of a run that take the absorbed form of latent attention."""
    n = run.ids.size
    first, end = (min(max(0, at - run.start), n) for at in run.expanded)
    return ((0, n),) if first == end else tuple(s for s in ((0, first), (end, n)) if s[0] < s[1])
