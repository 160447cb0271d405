"""The methods by which other programs divide the experts between CPU and GPU, for comparison with kt's own.

kt works on both at the same time, with the step captured and experts deferred. The others leave part of that out: all
experts on the CPU, or one phase after the other, expert by expert.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.decode import DecodeSteps
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.experts import Depths, HostExperts, LayerWeights
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.runners import Resident, TimedRunner
from ktcli.engine.device.slabs import Slab
from ktcli.engine.device.stream import Stream
from ktcli.errors import UsageError
from ktcli.measure.policy import COPIES, CPU_EXPERTS, GPU_EXPERTS, SEQUENTIAL, Policy
from ktcli.native import Pool
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.records import dataclass

# Tells whether an expert with a given number of tokens is computed on the CPU.
OnCpu = Callable[[int], bool]


def engine_under(
    policy: Policy, *given: Any, on_cpu: OnCpu | None = None, **others: Any
) -> DeviceEngine:
    """Returns an engine with a GPU that divides the routed experts between CPU and GPU by a policy: kt's own (KT), or
    the method of another program.

    Args:
        given, others: the arguments of `DeviceEngine`.
        on_cpu: given an expert's number of tokens, returns whether the CPU computes it; only for FIDDLER.
    Raises:
        UsageError: as `placement_under`.
    """
    model, recipe, source, pool, placement, *rest = given
    placed = placement_under(policy, placement)
    if policy is Policy.KT:
        return DeviceEngine(model, recipe, source, pool, placed, *rest, **others)
    return Baseline(policy, on_cpu, model, recipe, source, pool, placed, *rest, **others)


def placement_under(policy: Policy, placement: Placement) -> Placement:
    """Returns the placement as a policy needs it: for KT unchanged; for other policies with no experts deferred and,
    for ALL_CPU, no experts on the GPU.

    Raises:
        UsageError: the policy is sequential, but the placement keeps MLPs in main memory.
    """
    if policy is Policy.KT:
        return placement
    if policy in SEQUENTIAL and placement.apart:
        layer, part = min(placement.apart, key=lambda each: each.layer)
        raise UsageError(
            f"the placement rules keep the {part.value} of layer {layer} in main memory, which --policy {policy.value}"
            " cannot do",
            hint="leave out --policy, or the rule",
        )
    plain = replace(placement, depths=((0, 0),), deferral=False)
    if policy is not Policy.ALL_CPU:
        return plain
    long = replace(plain.long_prompts, short=PREFILL_CHUNK)
    return replace(plain, mask=np.zeros_like(plain.mask), long_prompts=long)


def policy_of(engine: DeviceEngine) -> Policy:
    """Returns the policy by which an engine divides the routed experts between CPU and GPU."""
    return engine.policy if isinstance(engine, Baseline) else Policy.KT


class Baseline(DeviceEngine):
    """An engine with another policy than kt's own; its other arguments are those of `DeviceEngine`.

    Args:
        on_cpu: as of `engine_under`; None: no expert that is missing on the device is computed on the CPU.
    """

    def __init__(self, policy: Policy, on_cpu: OnCpu | None, *given: Any, **others: Any) -> None:
        self.policy = policy
        self._on_cpu = on_cpu
        super().__init__(*given, **others)

    def _runner(self, host: HostExperts | None, resident: Resident) -> TimedRunner:
        if self.policy not in SEQUENTIAL or host is None:
            return super()._runner(host, resident)
        on_cpu = self._on_cpu if self.policy is Policy.FIDDLER else lambda n_tokens: False
        assert on_cpu is not None
        mask = self.placement.mask
        return OnDemand(host, resident, self._layers, mask, self._streams[0], self.pool, on_cpu)

    def _decode_steps(self, *given: Any) -> DecodeSteps | None:
        return None if self.policy in SEQUENTIAL else super()._decode_steps(*given)


@dataclass(slots=True)
class Phases:
    """The seconds that each of the sequential phases took."""

    cpu_s: float = 0.0
    device_s: float = 0.0
    copy_s: float = 0.0


@dataclass(slots=True)
class OnDemand(TimedRunner):
    """Computes each missing expert on the CPU, or copies it to the device, one phase after the other.

    Attributes:
        on_cpu: tells whether an expert with a number of tokens is computed on the CPU.
        phases: the times, summed over all steps.
    """

    host: HostExperts
    resident: Resident
    layers: Sequence[LayerWeights | None]
    mask: NDArray[np.bool_]
    stream: Stream
    pool: Pool
    on_cpu: Callable[[int], bool]
    phases: Phases = field(default_factory=Phases)

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Does nothing: a step needs no preparation, and no expert is deferred here, so `defer` is ignored."""

    def check(self) -> None:
        """Does nothing: errors of the CPU are raised in `finish`."""

    def operations(self) -> list[tuple[str, int]]:
        """Returns (phase, nanoseconds so far) for each of the three phases: experts on the CPU, experts on the GPU, and
        copies of experts; summed over all steps."""
        found = self.phases
        seconds = {CPU_EXPERTS: found.cpu_s, GPU_EXPERTS: found.device_s, COPIES: found.copy_s}
        return [(name, round(1e9 * each)) for name, each in seconds.items()]

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        """Returns (layer, x, ids, gate) as the handle for `finish`, which computes everything; nothing is computed
        yet."""
        return layer, x, ids, gate

    def finish(self, pending: Any) -> Tensor:
        """Computes the experts that a layer's tokens chose, first on the GPU, then on the CPU; returns their weighted
        sum for each token, [tokens, hidden]."""
        layer, x, ids, gate = pending
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
        kernels = self.resident.kernels
        parts = [kernels.experts(x, ids, gate, each) for each in slab.stacks(memory, slots)]
        total = torch.stack(parts).sum(0)
        self.stream.synchronize()
        self.phases.copy_s += copied - started
        self.phases.device_s += time.perf_counter() - copied
        return total

    def _on_cpu(
        self, layer: int, fetched: Sequence[int], x: Tensor, ids: Tensor, gate: Tensor
    ) -> Tensor:
        """Computes on the CPU the missing experts that were not fetched."""
        started = time.perf_counter()
        skipped = torch.tensor(fetched, dtype=ids.dtype, device=ids.device)
        # A step of its own: between two of them the pool is free to copy.
        self.host.begin(x.shape[0])
        self.host.enter(layer, x, torch.where(torch.isin(ids, skipped), -1, ids), gate)
        result = self.host.leave(layer, x.shape[0])
        self.stream.synchronize()
        self.host.check()
        self.phases.cpu_s += time.perf_counter() - started
        return result
