"""Plans with one GPU: attention, dense parts, cache and some experts lie there, all other experts on the CPU.

The GPU's memory is shared out first (`device`), then experts are chosen for what is left (`experts`), then
depth of deferral and threshold of streaming follow from predicted times (`deferral`, `prefill`), and
the speed from a simulated step (`simulate`). Main memory holds the embedding and the other experts only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ktcli.errors import NotEnoughMemory
from ktcli.hardware.machine import Gpu
from ktcli.models.model import Model
from ktcli.planner import deferral, experts
from ktcli.planner.device import (
    Budget,
    DeviceSizes,
    chunk_limit,
    device_context,
    fitting,
    share_out,
)
from ktcli.planner.device_cost import MEASURED_AT, Hybrid, device_rates
from ktcli.planner.experts import Hits, ResidentChoice
from ktcli.planner.host import Host
from ktcli.planner.hybrid_account import HybridAccount
from ktcli.planner.memory import LEAST_CONTEXT
from ktcli.planner.nodes import node_needs, traffic_bytes
from ktcli.planner.plan import EARLY_TOKENS, DevicePlan, Plan, Request, Speed
from ktcli.planner.prefill import NEVER, Prefill
from ktcli.planner.simulate import CPU, GPU, Simulation, simulate
from ktcli.planner.spec import (
    weight_bytes,
)
from ktcli.planner.stack import ModelLoads, split, stack_of


@dataclass(frozen=True, slots=True)
class _Case:
    """The model, host, GPU and request that are planned, and what follows from them at once."""

    model: Model
    host: Host
    gpu: Gpu
    request: Request
    stack: ModelLoads
    sizes: DeviceSizes
    context: int

    def hybrid(self, mask: experts.Mask, hits: Hits) -> Hybrid:
        """The times of the layers under a mask."""
        resident = tuple(int(n) for n in mask.sum(axis=1))
        rates, times = device_rates(self.gpu), self.request.times
        return Hybrid(self.stack, self.host.rates, rates, hits, resident, times)


def plan_with(model: Model, host: Host, gpu: Gpu, request: Request) -> Plan:
    """Plans `model` on the CPU of `host` (`Host.beside`) and one GPU; without advice.

    Raises:
        NotEnoughMemory: the GPU cannot hold what must lie on it.
        UsageError: the request does not fit this model.
    """
    stack = stack_of(model, request.recipe, request.use.cache_format)
    sizes = DeviceSizes.of(model, request.recipe, stack, request.use.streams)
    context = request.context or device_context(
        model, sizes, gpu, request.vram_bytes, served=request.use.served
    )
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
    """Simulates a decode step at `position`."""
    return simulate(hybrid.layers(position), depth, hybrid.head_s())


# --- decisions --------------------------------------------------------------------------------------


def _wants_stream(case: _Case) -> bool:
    """Returns whether memory is set aside for streaming: if it would be faster for the longest chunk with nothing
    on the GPU. The GPU's free memory has no say, so that more of it never means fewer experts."""
    if case.request.prefill_threshold is not None:
        return case.request.prefill_threshold != NEVER
    mask = case.stack.room(0).empty
    hybrid = case.hybrid(mask, experts.hits(mask, case.stack.top_k))
    buffer = case.sizes.buffer_bytes // max(1, case.sizes.expert_bytes)
    return Prefill(hybrid, chunk_limit(case.context), buffer).threshold() != NEVER


def _chosen(case: _Case, budget: Budget) -> tuple[ResidentChoice, Budget]:
    """Chooses the mask, and the budget that goes with it: nothing is streamed if all experts are on the GPU."""
    request, stack = case.request, case.stack
    whole = budget.without_stream()
    room = stack.room(whole.experts_bytes)
    wish = request.gpu_experts
    every = wish is None or (isinstance(wish, int) and wish == stack.experts)
    if not (every and room.all_bytes <= room.budget_bytes):
        room = stack.room(budget.experts_bytes)
    choice = experts.choose(wish, request.heat, room)
    return choice, whole if choice.mask.all() else budget


def _threshold(case: _Case, prefill: Prefill, choice: ResidentChoice) -> int:
    asked = case.request.prefill_threshold
    if not prefill.buffer_experts or choice.mask.all():
        return NEVER
    return prefill.threshold() if asked is None else asked


def _depths(case: _Case, hybrid: Hybrid) -> tuple[tuple[int, int], ...]:
    """The positions at which the depth of deferral changes, each with its depth from there on."""
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
    case: _Case, device: DevicePlan, prefill: Prefill, choice: ResidentChoice, speed: Speed
) -> Plan:
    model, host, recipe = case.model, case.host, case.request.recipe
    here, there = split(model, choice.mask)
    account = HybridAccount(
        model, host, case.request, case.stack, case.context, device, prefill, choice, here, there
    )
    others = account.other_bytes
    return Plan(
        host=host,
        recipe=recipe,
        context=case.context,
        lines=tuple(account.lines()),
        need_bytes=weight_bytes(here, recipe) + account.extra_bytes + others,
        speed=speed,
        advice=(),
        nodes=node_needs(here, recipe, host.teams, host.nodes, others) if host.nodes else (),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams)), here.tensors),
        device=replace(device, reasons=tuple(account.reasons())),
        notes=host.notes,
        use=case.request.use,
    )
