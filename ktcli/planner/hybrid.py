"""A plan with one GPU: attention, dense parts, cache and some experts there, all other experts on the CPU.

The GPU's memory is shared out first (`device`), then experts are chosen for what is left (`experts`), then
depth of deferral and threshold of streaming follow from predicted times (`deferral`, `prefill`), and
the speed from a simulated step (`simulate`). Main memory holds the embedding and the other experts only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ktcli.errors import NotEnoughMemory, gib
from ktcli.hardware.machine import Gpu
from ktcli.models.model import Model
from ktcli.ops.part import ModelPart
from ktcli.planner import deferral, experts
from ktcli.planner.device import (
    Budget,
    Sizes,
    chunk_limit,
    device_context,
    fitting,
    share_out,
)
from ktcli.planner.device_cost import MEASURED_AT, Hybrid, device_rates
from ktcli.planner.experts import Choice, Hits
from ktcli.planner.host import Host, node_words
from ktcli.planner.memory import LEAST_CONTEXT, PREFILL_CHUNK, PROCESS_BYTES
from ktcli.planner.nodes import extra_bytes, node_needs, traffic_bytes
from ktcli.planner.plan import EARLY_TOKENS, DevicePlan, Line, Plan, Request, Speed
from ktcli.planner.prefill import NEVER, Prefill
from ktcli.planner.simulate import CPU, GPU, Simulation, simulate
from ktcli.planner.spec import (
    STATES_REASON,
    Share,
    Step,
    Unit,
    Work,
    kv_bytes_per_token,
    parts,
    sequence_bytes,
    step_work,
    tensor_work,
    weight_bytes,
)
from ktcli.planner.stack import Stack, device_bytes, split, stack_of

# Of main memory, assumed, not yet measured: torch with its CUDA libraries loaded.
TORCH_BYTES = 3 << 30
ON_GPU = "GPU"  # where a line lies


@dataclass(frozen=True, slots=True)
class _Case:
    """What is planned."""

    model: Model
    host: Host
    gpu: Gpu
    request: Request
    stack: Stack
    sizes: Sizes
    context: int

    def hybrid(self, mask: experts.Mask, hits: Hits) -> Hybrid:
        """The times of a mask."""
        resident = tuple(int(n) for n in mask.sum(axis=1))
        rates, times = device_rates(self.gpu), self.request.times
        return Hybrid(self.stack, self.host.rates, rates, hits, resident, times)


def plan_with(model: Model, host: Host, gpu: Gpu, request: Request) -> Plan:
    """Plan `model` on the CPU of `host` (`Host.beside`) and one GPU; without advice.

    Raises:
        NotEnoughMemory: the GPU cannot hold what must lie on it.
        UsageError: what is asked for is not of this model.
    """
    stack = stack_of(model, request.recipe)
    sizes = Sizes.of(model, request.recipe, stack)
    context = request.context or device_context(model, sizes, gpu, request.vram_bytes)
    case = _Case(model, host, gpu, request, stack, sizes, context)
    wants = _wants_stream(case)
    budget = share_out(model, sizes, gpu, context, streams=wants, limit=request.vram_bytes)
    if not budget.fits:
        raise _too_small(case, budget)
    choice, budget = _chosen(case, budget)
    hits = experts.hits(choice.mask, stack.top_k, request.heat)
    hybrid = case.hybrid(choice.mask, hits)
    prefill = Prefill(hybrid, budget.chunk, budget.stream_experts)
    threshold = _threshold(case, prefill, choice)
    depths = _depths(case, hybrid)
    early = simulated(hybrid, depths[0][1], min(EARLY_TOKENS, context - 1))
    late = simulated(hybrid, depths[-1][1], context - 1)
    tokens = min(budget.chunk, context)
    speed = Speed(1 / early.step_s, 1 / late.step_s, tokens / prefill.seconds(tokens, threshold))
    taken = int(stack.expert.size_bytes[stack.moe] @ choice.mask.sum(axis=1))
    device = DevicePlan(
        gpu=gpu,
        need=replace(budget.need, experts=taken),
        budget_bytes=budget.limit_bytes,
        resident=tuple(tuple(np.flatnonzero(row).tolist()) for row in choice.mask),
        experts=stack.experts,
        rule=choice.rule,
        hit_rate=hits.rate,
        k_cpu=hits.k_cpu,
        depths=depths,
        prefill_threshold=threshold,
        chunk=budget.chunk,
        stream_experts=budget.stream_experts,
        times=hybrid.times(MEASURED_AT),
        rates=hybrid.device,
        cpu_busy=early.busy_s(CPU) / early.step_s,
        gpu_busy=early.busy_s(GPU) / early.step_s,
        reasons=(),
    )
    return _assembled(case, device, prefill, choice, speed)


def simulated(hybrid: Hybrid, depth: int, position: int) -> Simulation:
    """A decode step at `position`."""
    return simulate(hybrid.layers(position), depth, hybrid.head_s())


# --- decisions --------------------------------------------------------------------------------------


def _wants_stream(case: _Case) -> bool:
    """Whether memory is set aside for streaming: if it would be faster for the longest chunk with nothing
    on the GPU. What is free there has no say, so that more of it never means fewer experts."""
    if case.request.prefill_threshold is not None:
        return case.request.prefill_threshold != NEVER
    mask = case.stack.room(0).empty
    hybrid = case.hybrid(mask, experts.hits(mask, case.stack.top_k))
    buffer = case.sizes.buffer_bytes // max(1, case.sizes.expert_bytes)
    return Prefill(hybrid, chunk_limit(case.context), buffer).threshold() != NEVER


def _chosen(case: _Case, budget: Budget) -> tuple[Choice, Budget]:
    """The mask, and the budget that is left: nothing is streamed if all experts are on the GPU."""
    request, stack = case.request, case.stack
    whole = budget.without_stream()
    room = stack.room(whole.experts_bytes)
    wish = request.gpu_experts
    every = wish is None or (isinstance(wish, int) and wish == stack.experts)
    if not (every and room.all_bytes <= room.budget_bytes):
        room = stack.room(budget.experts_bytes)
    choice = experts.choose(wish, request.heat, room)
    return choice, whole if choice.mask.all() else budget


def _threshold(case: _Case, prefill: Prefill, choice: Choice) -> int:
    asked = case.request.prefill_threshold
    if not prefill.buffer_experts or choice.mask.all():
        return NEVER
    return prefill.threshold() if asked is None else asked


def _depths(case: _Case, hybrid: Hybrid) -> tuple[tuple[int, int], ...]:
    """The depth from each position on, where it changes."""
    if case.request.defer is not None:
        return ((0, case.request.defer),)
    found: list[tuple[int, int]] = []
    hits = hybrid.mean_hits()
    for start in deferral.context_buckets(case.context):
        times = hybrid.times(max(start, MEASURED_AT))
        depth = deferral.depth(times, hits, case.stack.top_k)
        if not found or found[-1][1] != depth:
            found.append((start, depth))
    return tuple(found)


def _too_small(case: _Case, budget: Budget) -> NotEnoughMemory:
    shorter = fitting(case.model, case.sizes, case.gpu, case.context, case.request.vram_bytes)
    hint = f"--context {shorter} fits; --device cpu" if shorter >= LEAST_CONTEXT else "--device cpu"
    what = f"everything but the experts, with {case.context} positions on {case.gpu.name},"
    return NotEnoughMemory(what, budget.need.total, budget.limit_bytes, hint=hint)


# --- the plan ---------------------------------------------------------------------------------------


def _assembled(
    case: _Case, device: DevicePlan, prefill: Prefill, choice: Choice, speed: Speed
) -> Plan:
    model, host, recipe = case.model, case.host, case.request.recipe
    here, there = split(model, choice.mask)
    device = replace(device, reasons=tuple(_reasons(case, device, prefill, choice)))
    main = _Main.of(case, here, device)
    lines = [*_device_lines(case, device, prefill, there), *_main_lines(case, main, prefill, here)]
    others = main.scratch + main.pinned + main.process + host.margin_bytes
    return Plan(
        host=host,
        recipe=recipe,
        context=case.context,
        lines=tuple(lines),
        need_bytes=weight_bytes(here, recipe) + main.extra + others,
        speed=speed,
        advice=(),
        nodes=node_needs(here, recipe, host.teams, host.nodes, others) if host.nodes else (),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams)), here.tensors),
        device=device,
        notes=host.notes,
    )


@dataclass(frozen=True, slots=True)
class _Main:
    """Bytes of main memory beside the weights."""

    scratch: int
    pinned: int
    process: int
    extra: int

    @classmethod
    def of(cls, case: _Case, here: Share, device: DevicePlan) -> _Main:
        spec, recipe = case.model.spec, case.request.recipe
        columns = 3 * spec.hidden + 2 * spec.top_k * spec.expert_width
        extra = sum(extra_bytes(here, recipe, case.host.teams).values())
        pinned = device.need.stream + 8 * PREFILL_CHUNK * spec.hidden + 4 * spec.vocab
        busy = any(device.k_cpu)
        return cls(
            4 * PREFILL_CHUNK * columns if busy else 0, pinned, PROCESS_BYTES + TORCH_BYTES, extra
        )


def _device_lines(
    case: _Case, device: DevicePlan, prefill: Prefill, there: Share
) -> Iterator[Line]:
    """What lies on the GPU; predicted times are those of its own work, part by part."""
    early = min(EARLY_TOKENS, case.context - 1)
    chunk = min(PREFILL_CHUNK, case.context)
    model, recipe, need = case.model, case.request.recipe, device.need
    steps = Step(1, early), Step(chunk)
    one, many = ({w.part: w for w in step_work(model, recipe, s, device_bytes)} for s in steps)
    hybrid = prefill.hybrid

    def line(part: ModelPart, fmt: str, size: int, reason: str, share: float = 1.0) -> Line:
        nothing = Work(part, Unit.BF16, 0, 0)
        first, chunked = one.get(part, nothing), many.get(part, nothing)
        return Line(
            part.value,
            fmt,
            ON_GPU,
            size,
            round(first.read_bytes * share),
            hybrid.part_s(first) * share,
            hybrid.part_s(chunked) * share / chunk,
            reason,
        )

    sizes: defaultdict[ModelPart, int] = defaultdict(int)
    for tensor in there.tensors:
        sizes[tensor.part] += device_bytes(tensor, recipe)
    for part in parts(there, recipe):
        routed, size = part.part is ModelPart.EXPERTS, sizes[part.part]
        reason = _resident_words(device) if routed else "every token needs it"
        fmt = part.format if size == part.size_bytes else "f32"
        yield line(part.part, fmt, size, reason, device.hit_rate if routed else 1.0)
    kept = f"{case.context} positions, {gib(kv_bytes_per_token(model.spec))} each"
    states = sequence_bytes(model.spec)
    yield line(ModelPart.CACHE, "bf16", need.cache - states, kept)
    if states:
        yield line(ModelPart.STATES, "f32", states, STATES_REASON)
    words = f"activations of {device.chunk} tokens"
    yield Line.reserved("workspace", "f32", ON_GPU, need.workspace, words)
    if need.stream:
        words = f"two buffers of {device.stream_experts} experts for long prompts"
        yield Line.reserved("stream buffers", recipe.experts_name, ON_GPU, need.stream, words)
    runtime = f"CUDA, graphs; {gib(need.margin)} left free"
    yield Line.reserved(
        "runtime, margin", "", ON_GPU, need.runtime + need.graph + need.margin, runtime
    )


# What main memory holds beside experts; a GPU has all else.
_HOST_REASONS = {
    ModelPart.EMBEDDING: "one row per token",
    ModelPart.VECTORS: "biases of experts",
}


def _main_lines(case: _Case, main: _Main, prefill: Prefill, here: Share) -> Iterator[Line]:
    """What lies in main memory."""
    host, recipe, spec = case.host, case.request.recipe, case.model.spec
    teams, hybrid = len(host.teams), prefill.hybrid
    spread = f"{node_words(host.nodes)}, interleaved" if host.nodes else "memory"
    split_words = f"{node_words(host.nodes)}, cut between {teams} teams"
    chunk = min(PREFILL_CHUNK, case.context)
    hits, moe = hybrid.hits.k_cpu, case.stack.moe
    sizes, each = case.stack.expert.size_bytes[moe], np.array(hybrid.expert_s)[moe]
    for part in parts(here, recipe):
        if part.part is ModelPart.EXPERTS:
            mean = sum(hits) / len(hits)
            yield Line(
                part.part.value,
                part.format,
                split_words if main.extra else spread,
                part.size_bytes + main.extra,
                round(float(np.dot(sizes, hits))),
                float(np.dot(each, hits)),
                prefill.cpu_experts_s(chunk) / chunk,
                f"{mean:.1f} of {spec.top_k} per token in {spec.moe_layers} layers",
            )
        else:
            of_it = (tensor for tensor in here.tensors if tensor.part is part.part)
            read = sum(tensor_work(tensor, spec, recipe, Step(1)).read_bytes for tensor in of_it)
            name, words = part.part.value, _HOST_REASONS[part.part]
            yield Line(name, part.format, spread, part.size_bytes, read, 0.0, 0.0, words)
    if main.scratch:
        words = f"experts of a step of {PREFILL_CHUNK} tokens"
        yield Line.reserved("scratch", "f32", spread, main.scratch, words)
    passing = "what passes to and from the GPU"
    yield Line.reserved("pinned buffers", "", spread, main.pinned, passing)
    others = f"the program, torch; {gib(host.margin_bytes)} for others"
    rest = main.process + host.margin_bytes
    yield Line.reserved("process, margin", "", spread, rest, others)


# --- words ------------------------------------------------------------------------------------------


def _resident_words(device: DevicePlan) -> str:
    counts = device.n_experts
    least, most = min(counts), max(counts)
    each = f"{most}" if least == most else f"{least} to {most}"
    return f"{device.rule}: {each} of {device.experts} per layer, {device.hit_rate:.0%} of the hits"


def _reasons(case: _Case, device: DevicePlan, prefill: Prefill, choice: Choice) -> Iterator[str]:
    if choice.reason:
        yield choice.reason
    times, request = device.times, case.request
    if times.expert_s:
        asked = " as asked" if request.defer is not None else ""
        yield (
            f"deferral {_depth_words(device)}{asked}: the GPU needs {times.device_s * 1e6:.0f} µs per layer"
            f" before experts, the CPU {times.expert_s * 1e6:.0f} µs per expert"
        )
    else:
        yield "all experts are on the GPU: nothing is deferred or streamed"
        return
    copied = sum(
        (case.stack.experts - n) * size
        for n, size in zip(device.n_experts, case.stack.room(0).sizes, strict=True)
    )
    once = f"a pass copies {gib(copied)} in {copied / prefill.copy_bps:.1f} s"
    if device.streams:
        yield f"prompts from {device.prefill_threshold} tokens on are streamed: {once}"
    else:
        yield f"no prompt is streamed: {once}"


def _depth_words(device: DevicePlan) -> str:
    first, *later = device.depths
    return ", ".join([str(first[1]), *(f"{depth} from {start} on" for start, depth in later)])
