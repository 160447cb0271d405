"""Who computes the routed experts of a step, and when: one class for each way there is.

- `Coupled`: the CPU computes those in main memory while the device computes its own; what chat uses.
- `Streamed`: the device computes all, those in main memory after a trip over the link; for long prompts.
- `OnDemand`: one phase after the other, expert by expert, as other programs do it; for comparison.

Each is an `ExpertRunner` (ops/torch/backend.py) with two calls more: `begin` before the work of a step is
given to the stream, and `check` after it is done, which raises what went wrong beside the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import HostExperts, LayerWeights
from ktcli.engine.device.slabs import Slab, SlabStream
from ktcli.engine.device.stream import Stream
from ktcli.engine.policy import COPIES, CPU_EXPERTS, GPU_EXPERTS
from ktcli.native import Pool
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.packed import Stack


@dataclass(frozen=True, slots=True)
class Resident:
    """The device's own experts.

    Attributes:
        stacks: of each layer, perhaps of no experts.
    """

    kernels: Kernels
    stacks: Sequence[Stack]

    def run(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor | None:
        """Sum of the chosen experts that are here, [T, hidden]; None if the layer has none."""
        stacks = self.stacks[layer]
        return apply(self.kernels, stacks, x, ids, gate) if stacks.gate_up.count else None


def apply(kernels: Kernels, s: Stack, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
    """Weighted sum of the chosen experts that are in the stacks, [T, hidden]."""
    return kernels.experts(x, ids, gate, s.slots, s.gate_up, s.down, s.extras)


class Coupled:
    """CPU and device at the same time.

    Args:
        host: experts in main memory; None: there are none.
    """

    def __init__(self, host: HostExperts | None, resident: Resident) -> None:
        self._host, self._resident = host, resident

    def begin(self, n_tokens: int, defer: int) -> None:
        if self._host is not None:
            self._host.begin(n_tokens, defer)

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Any:
        if self._host is not None and self._host.has(layer):
            self._host.enter(layer, x, ids, gate)
        return layer, x.shape[0], self._resident.run(layer, x, ids, gate)

    def finish(self, started: Any) -> Tensor:
        layer, n_tokens, own = started
        if self._host is None or not self._host.has(layer):
            return cast(Tensor, own)
        theirs = self._host.leave(layer, n_tokens)
        return theirs if own is None else cast(Tensor, own.add_(theirs))

    def check(self) -> None:
        if self._host is not None:
            self._host.check()

    def operations(self) -> list[tuple[str, int]]:
        """(operation of the CPU, nanoseconds so far). Of the device only a trace can tell, as nobody waits
        for it here."""
        return [] if self._host is None else self._host.operations()


class Streamed:
    """The device computes everything; slabs of experts come over the link, one ahead."""

    def __init__(self, slabs: SlabStream, resident: Resident) -> None:
        self._slabs, self._resident = slabs, resident

    def begin(self, n_tokens: int, defer: int) -> None:
        """`defer` does not count: nothing is late here."""
        self._slabs.begin()

    def check(self) -> None:
        pass

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Any:
        return layer, x, ids, gate, self._resident.run(layer, x, ids, gate)

    def finish(self, started: Any) -> Tensor:
        layer, x, ids, gate, total = started
        for slices in self._slabs.of_layer(layer):
            for stacks in slices:
                part = apply(self._resident.kernels, stacks, x, ids, gate)
                total = part if total is None else total.add_(part)
        return torch.zeros_like(x) if total is None else total


@dataclass(slots=True)
class Phases:
    """What sequential phases took, in seconds."""

    cpu_s: float = 0.0
    device_s: float = 0.0
    copy_s: float = 0.0


@dataclass(slots=True)
class OnDemand:
    """Each missing expert is computed on the CPU or fetched, one phase after the other.

    Attributes:
        on_cpu: whether an expert of a layer with so many tokens goes to the CPU.
        phases: added up over all steps.
    """

    host: HostExperts
    resident: Resident
    layers: Sequence[LayerWeights | None]
    mask: NDArray[np.bool_]
    stream: Stream
    pool: Pool
    on_cpu: Callable[[int], bool]
    phases: Phases = field(default_factory=Phases)

    def begin(self, n_tokens: int, defer: int) -> None:
        """`defer` does not count: nothing is late here."""

    def check(self) -> None:
        pass

    def operations(self) -> list[tuple[str, int]]:
        """(phase, nanoseconds so far)."""
        found = self.phases
        seconds = {CPU_EXPERTS: found.cpu_s, GPU_EXPERTS: found.device_s, COPIES: found.copy_s}
        return [(name, round(1e9 * each)) for name, each in seconds.items()]

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Any:
        return layer, x, ids, gate

    def finish(self, started: Any) -> Tensor:
        layer, x, ids, gate = started
        phases = self.phases
        self.stream.synchronize()
        wanted, counts = np.unique(ids.cpu().numpy(), return_counts=True)
        here = self.mask[layer][wanted]
        away = list(zip(wanted[~here].tolist(), counts[~here].tolist(), strict=True))
        fetched = [e for e, n in away if not self.on_cpu(n)]
        total = torch.zeros_like(x)
        started_at = time.perf_counter()
        own = self.resident.run(layer, x, ids, gate)
        if own is not None:
            total += own
        self.stream.synchronize()
        phases.device_s += time.perf_counter() - started_at
        if fetched:
            total += self._fetched(layer, fetched, x, ids, gate)
        if len(fetched) < len(away):
            total += self._on_cpu(layer, fetched, x, ids, gate)
        return total

    def _fetched(
        self, layer: int, experts: Sequence[int], x: Tensor, ids: Tensor, gate: Tensor
    ) -> Tensor:
        weights = self.layers[layer]
        assert weights is not None
        slab, started = Slab(layer, weights, tuple(experts)), time.perf_counter()
        staged = torch.empty(slab.size_bytes, dtype=torch.uint8)
        slab.gather(staged, self.pool)
        memory = staged.to(self.stream.device)
        slots = slab.slots(self.mask.shape[1]).to(self.stream.device)
        self.stream.synchronize()
        copied = time.perf_counter()
        parts = [apply(self.resident.kernels, s, x, ids, gate) for s in slab.stacks(memory, slots)]
        total = torch.stack(parts).sum(0)
        self.stream.synchronize()
        self.phases.copy_s += copied - started
        self.phases.device_s += time.perf_counter() - copied
        return total

    def _on_cpu(
        self, layer: int, fetched: Sequence[int], x: Tensor, ids: Tensor, gate: Tensor
    ) -> Tensor:
        """All others that are missing here."""
        started = time.perf_counter()
        skipped = torch.tensor(fetched, dtype=ids.dtype, device=ids.device)
        # A step of its own: between two of them the pool is free to copy.
        self.host.begin(x.shape[0], 0)
        self.host.enter(layer, x, torch.where(torch.isin(ids, skipped), -1, ids), gate)
        result = self.host.leave(layer, x.shape[0])
        self.stream.synchronize()
        self.host.check()
        self.phases.cpu_s += time.perf_counter() - started
        return result
