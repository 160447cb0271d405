"""Measures the ceilings of a device, and compares the work of CPU and device with them.

Three rates of the device are measured, with torch's own operations on far more memory than its caches
hold: reading, bf16 products, and copies from pinned memory. The ideal of a step is the longer of what the
CPU must read and what the device must read, each at its rate, for both can work at the same time;
the ideal of a prompt is the same with operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from ktcli.engine import Engine
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.stream import Stream, device_errors, stream_on
from ktcli.measure.baselines import policy_of
from ktcli.measure.bench import Ceilings, Job, Phase, steps, work_of
from ktcli.measure.policy import SEQUENTIAL, Policy
from ktcli.native import Ceiling
from ktcli.ops.part import ModelPart
from ktcli.planner import experts
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.forecast import Forecast, Known
from ktcli.planner.prefill import NEVER
from ktcli.planner.spec import StepShape, Unit
from ktcli.planner.stack import share_apart, stack_of
from ktcli.records import dataclass

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """The sizes of a measurement of a device.

    Attributes:
        size_bytes: the bytes of one read.
        rows: the rows of two square matrices that are multiplied.
        repeats: the number of times that one round repeats an operation.
    """

    size_bytes: int
    rows: int
    repeats: int


_LARGEST_BYTES = 2 << 30
_SMALLEST_BYTES = 256 << 20  # several times the largest cache
_ON_CPU = Probe(1 << 20, 64, 1)  # a CPU in a device's place: only in tests


def measure_rates(device: torch.device) -> DeviceRates:
    """Returns the measured rates of a GPU: bytes per second of reading and of copies from main memory, and bf16
    operations per second. It takes about a second; the memory of the GPU is free again afterwards.

    Raises:
        DeviceError: the device failed, or has no memory left.
    """
    with device_errors("measuring the GPU"):
        if device.type != "cuda":
            return _rates(device, _ON_CPU)
        free, _ = torch.cuda.mem_get_info(device)
        size = min(_LARGEST_BYTES, max(_SMALLEST_BYTES, free // 8))
        found = _rates(device, Probe(size // 8 * 8, 8192, 10))
        torch.cuda.empty_cache()
        return found


def _rates(device: torch.device, size: Probe) -> DeviceRates:
    stream = stream_on(device)
    with stream.running():
        data = torch.ones(size.size_bytes // 4, device=device)
        other = torch.empty_like(data)
        square = torch.ones(size.rows, size.rows, device=device, dtype=torch.bfloat16)
        product = torch.empty_like(square)
    pinned = stream.pinned(size.size_bytes // 8)
    target = other.view(torch.uint8)[: pinned.nbytes]
    # A sum reads only; a copy reads and writes. Which of them is nearer to the limit differs.
    summed = _seconds(stream, size, data.sum)
    copied = _seconds(stream, size, lambda: other.copy_(data))
    multiplied = _seconds(stream, size, lambda: torch.mm(square, square, out=product))
    fetched = _seconds(stream, size, lambda: stream.copy(target, pinned))
    return DeviceRates(
        read_bps=max(data.nbytes / summed, 2 * data.nbytes / copied),
        bf16_ops=2 * size.rows**3 / multiplied,
        copy_bps=pinned.nbytes / fetched,
        measured=True,
        basis="GPU measured in this run",
    )


def _seconds(stream: Stream, size: Probe, work: Callable[[], object]) -> float:
    """The median seconds of one repeat."""
    found = []
    for round_ in range(_ROUNDS + 1):
        start = time.perf_counter()
        with stream.running():
            for _ in range(size.repeats):
                work()
        stream.synchronize()
        if round_:  # the first one warms up
            found.append((time.perf_counter() - start) / size.repeats)
    return median(found)


@dataclass(frozen=True, slots=True)
class Split:
    """The bytes and operations that CPU and device have of a step.

    Attributes:
        cpu_ops: the CPU's operations by unit.
    """

    cpu_bytes: float
    cpu_ops: dict[Unit, int]
    device_bytes: float
    device_ops: float


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """The roofline of an engine with a device.

    Attributes:
        device: the device's measured rates.
    """

    cpu: Ceilings
    device: DeviceRates
    placement: Placement
    policy: Policy = Policy.KT

    @classmethod
    def of(cls, engine: DeviceEngine, device: DeviceRates) -> DeviceCeilings:
        """Returns the limits that runs of an engine with a GPU are compared with: those of its CPU threads, not
        measured yet, and the measured rates of its GPU, `device`."""
        return cls(Ceilings.of(engine.pool), device, engine.placement, policy_of(engine))

    def ideal_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that one run of the job would take with CPU and GPU working at the same time, each at its
        limit: the rate of reading for decode, of arithmetic for prefill."""
        found = [self.split(engine, job, step) for step in steps(engine, job)]
        if job.kind is Phase.DECODE:
            read = sum(each.cpu_bytes for each in found)
            theirs = sum(each.device_bytes for each in found) / self.device.read_bps
            return max(read / self.cpu.measure(Ceiling.READ), theirs)
        ops = {unit: sum(each.cpu_ops[unit] for each in found) for unit in Unit}
        theirs = sum(each.device_ops for each in found) / self.device.bf16_ops
        return max(self.cpu.compute_s(ops), theirs)

    def predicted_s(self, engine: Engine, job: Job) -> float:
        """Returns the seconds that the planner predicts for one run of the job, from the measured limits of CPU and
        GPU."""
        forecast, policy = self.forecast(engine), self.policy
        if policy in SEQUENTIAL:
            computes = policy is Policy.FIDDLER
            return sum(
                forecast.on_demand_s(step.n_tokens, step.start, may_compute=computes)
                for step in steps(engine, job)
            )
        if job.kind is Phase.PREFILL:
            threshold = self.placement.long_prompts.threshold
            asked = NEVER if threshold is None else threshold
            return forecast.prefill_s(job.n_tokens, asked, job.context)
        last = job.context + job.n_tokens
        positions = range(job.context, last)
        return sum(forecast.decode_s(at, engine.depth_at(at), job.batch) for at in positions)

    def forecast(self, engine: Engine) -> Forecast:
        """Returns the planner's forecast, which tells the seconds of decode and prefill, for an engine's placement and
        the measured rates of CPU and GPU."""
        placement = self.placement
        expert = int(stack_of(engine.model, engine.recipe).expert.size_bytes.max(initial=0))
        known = Known(
            self.cpu.rates(),
            self.device,
            placement.mask,
            chunk=placement.long_prompts.chunk,
            stream_experts=placement.slab_bytes // expert if expert else 0,
            gpus=1 + len(placement.borders),
            cache=engine.cache_format,
            adapters=placement.adapters,
            apart=placement.apart,
        )
        return Forecast.of(engine.model, engine.recipe, known)

    def split(self, engine: Engine, job: Job, step: StepShape) -> Split:
        """Returns the bytes read and the operations of one step of a job, separately for CPU and GPU; experts that are
        streamed to the GPU, as for long prompts, count as the GPU's."""
        long = self.placement.long_prompts
        streamed = job.kind is Phase.PREFILL and long.streams(step.n_tokens)
        hit_rate = experts.hits(self.placement.mask, engine.spec.top_k).rate
        cpu_bytes = device_bytes = device_ops = 0.0
        cpu_ops = dict.fromkeys(Unit, 0)
        model, apart = engine.model, self.placement.apart
        shares = {part: share_apart(model, part, apart) for part in ModelPart if part.is_mlp}
        for work in work_of(engine, job, step):
            away = shares.get(work.part, 0.0)
            if work.part is ModelPart.EXPERTS and not streamed:
                away = 1 - hit_rate
            cpu_bytes += away * work.read_bytes
            cpu_ops[work.unit] += round(away * work.ops)
            device_bytes += (1 - away) * work.read_bytes
            device_ops += (1 - away) * work.ops
        return Split(cpu_bytes, cpu_ops, device_bytes, device_ops)
