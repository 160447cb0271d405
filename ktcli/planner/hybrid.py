"""Plans with GPUs: attention, dense parts, cache and some experts are on the GPUs, all other experts on the CPU.

Layers are divided between the GPUs and the memory of each is shared out first (`segments`, `device`), then experts are
chosen for what is left (`experts`), then depth of deferral and threshold of streaming follow from predicted times
(`deferral`, `prefill`), and the speed from a simulated step (`simulate`). Main memory holds the embedding and the other
experts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.machine import Gpu
from ktcli.models.model import Model
from ktcli.ops.part import LayerPart
from ktcli.planner import deferral, experts
from ktcli.planner.alone import slowed
from ktcli.planner.constraints import Constraints
from ktcli.planner.device import Budget, chunk_limit
from ktcli.planner.device_cost import MEASURED_AT, Hybrid, device_rates, slowest
from ktcli.planner.experts import Hits, ResidentChoice
from ktcli.planner.host import Host
from ktcli.planner.hybrid_account import HybridAccount
from ktcli.planner.memory import LEAST_CONTEXT
from ktcli.planner.nodes import node_needs, traffic_bytes
from ktcli.planner.plan import DevicePlan, Plan, Request, SegmentPlan, Speed, early_position
from ktcli.planner.prefill import NEVER, Prefill
from ktcli.planner.segments import Devices
from ktcli.planner.simulate import CPU, GPU, Simulation, simulate
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams
from ktcli.planner.spec import weight_bytes
from ktcli.planner.stack import ModelLoads, split, stack_of
from ktcli.planner.worth import Conditions, Worth
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class _Case:
    """The model, host, GPUs and request that are planned, and what follows from them at once."""

    model: Model
    host: Host
    devices: Devices
    request: Request
    stack: ModelLoads
    context: int
    constraints: Constraints | None
    experts_on: ExpertTeams

    @property
    def apart(self) -> frozenset[LayerPart]:
        """The MLPs that rules keep in main memory."""
        return _apart(self.constraints)

    def hybrid(self, mask: experts.Mask, hits: Hits, gpus: Sequence[Gpu] = ()) -> Hybrid:
        """The times of the layers under a mask, on these GPUs; (): on all that there are."""
        resident = tuple(int(n) for n in mask.sum(axis=1))
        each = gpus or self.devices.gpus
        rates, times = slowest([device_rates(gpu) for gpu in each]), self.request.times
        longer = self.adapted_experts
        slower = tuple(
            longer * (slowed(self.host, self.experts_on[n]) if n in self.experts_on else 1.0)
            for n in range(self.stack.layers)
        )
        return Hybrid(
            self.stack,
            self.host.rates,
            rates,
            hits,
            resident,
            times,
            max(1, len(gpus)),
            slower if self.experts_on or longer > 1 else (),
        )

    @property
    def adapted_experts(self) -> float:
        """How many times the bytes of an expert are read with what an adapter has for it."""
        room, expert = self.request.use.adapters, self.stack.expert.size_bytes
        whole = self.stack.experts * float(expert.sum())
        return 1.0 + room.experts_bytes / whole if room is not None and whole else 1.0


def _apart(constraints: Constraints | None) -> frozenset[LayerPart]:
    return frozenset() if constraints is None else constraints.apart


def plan_with(
    model: Model,
    host: Host,
    gpus: Sequence[Gpu],
    request: Request,
    constraints: Constraints | None = None,
    experts_on: ExpertTeams = ALL_TEAMS,
) -> Plan:
    """Returns the plan of `model` on GPUs, as many of `gpus` as help, and the CPU of `host` (a `Host.beside`): places,
    bytes and predicted speed, without advice.

    Args:
        gpus: one or more, in the order in which they take layers.
        constraints: what the request's rules decide; None: nothing.
        experts_on: for layers whose experts only some teams hold, the indices of these teams, by layer.
    Raises:
        NotEnoughMemory: the GPUs cannot hold what must lie on them.
        UsageError: the request does not fit this model.
    """
    request, apart = _with_experts_of_adapters(request, constraints), _apart(constraints)
    use = request.use
    stack = stack_of(model, request.recipe, use.cache_format, use.adapters, apart)
    devices = _devices(model, host, gpus, request, stack, constraints)
    context = request.context or devices.default_context(served=request.use.served)
    case = _Case(model, host, devices, request, stack, context, constraints, experts_on)
    budgets = devices.budgets(context, streams=_wants_stream(case))
    if not all(each.fits for each in budgets):
        raise _too_small(case, budgets)
    return _planned(case, *_chosen(case, budgets))


def _with_experts_of_adapters(request: Request, constraints: Constraints | None) -> Request:
    """Returns the request with all experts in main memory, where adapters change some: the CPU computes these.

    Raises:
        UsageError: some are wanted on a GPU.
    """
    room = request.use.adapters
    if room is None or not room.experts_bytes:
        return request
    placed = constraints is not None and constraints.resident.any()
    wish = request.gpu_experts
    if placed or (wish.any() if isinstance(wish, np.ndarray) else wish not in (None, 0)):
        raise UsageError(
            "the adapter changes routed experts, which then stay in main memory, but some are to be on a GPU",
            hint="leave out --gpu-experts, or the placement rules for experts",
        )
    if request.prefill_threshold not in (None, NEVER):
        raise UsageError(
            "the adapter changes routed experts, which then stay in main memory, so no prompt is streamed",
            hint="leave out --prefill-threshold",
        )
    return replace(request, gpu_experts=0, prefill_threshold=NEVER)


def _devices(
    model: Model,
    host: Host,
    gpus: Sequence[Gpu],
    request: Request,
    stack: ModelLoads,
    constraints: Constraints | None,
) -> Devices:
    """The GPUs, with what is worth having on them where nobody says what is to be there."""
    worth = Worth()
    if request.gpu_experts is None:
        rates = slowest([device_rates(gpu) for gpu in gpus])
        position = early_position(request.context or model.spec.context)
        conditions = Conditions(stack, host.rates, rates, request.times, request.defer, position)
        worth = conditions.worth()
    use, spec = request.use, model.spec
    outputs = use.outputs(spec, request.context or spec.context) if use.all_logits else 0
    return Devices(
        spec,
        model.borders,
        stack,
        tuple(gpus),
        worth,
        use.streams,
        request.limits,
        constraints,
        outputs,
    )


def _planned(case: _Case, choice: ResidentChoice, budgets: Sequence[Budget]) -> Plan:
    """The plan of decided memory."""
    stack, context = case.stack, case.context
    hits = experts.hits(choice.mask, stack.top_k, case.request.heat)
    hybrid = case.hybrid(choice.mask, hits, [each.gpu for each in budgets])
    streamed = [each.stream_experts for each in budgets if each.need.stream]
    chunk, stream_experts = budgets[0].chunk, min(streamed, default=0)
    prefill = Prefill(hybrid, chunk, stream_experts)
    threshold = _threshold(case, prefill, choice)
    depths = _depths(case, hybrid)
    position, depth = early_position(context), depths[0][1]
    early = simulated(hybrid, depth, position)
    speed = Speed.of(
        context,
        chunk,
        lambda at: simulated(hybrid, deferral.depth_at(depths, at), at).step_s,
        lambda tokens: prefill.seconds(tokens, threshold),
    )
    device = DevicePlan(
        segments=tuple(_segment(stack, each, choice.mask) for each in budgets),
        resident=tuple(tuple(np.flatnonzero(row).tolist()) for row in choice.mask),
        experts=stack.experts,
        rule=choice.rule,
        hit_rate=hits.rate,
        k_cpu=hits.k_cpu,
        depths=depths,
        prefill_threshold=threshold,
        chunk=chunk,
        stream_experts=stream_experts,
        times=hybrid.times(MEASURED_AT),
        rates=hybrid.device,
        cpu_busy=early.busy_s(CPU) / early.step_s,
        gpu_busy=early.busy_s(GPU) / early.step_s,
        reasons=(),
        undeferred=1 / simulated(hybrid, 0, position).step_s if depth else None,
        apart=case.apart,
    )
    return _assembled(case, device, prefill, choice, speed)


def _segment(stack: ModelLoads, budget: Budget, mask: experts.Mask) -> SegmentPlan:
    """What a GPU has, with the experts that were chosen for it."""
    rows = stack.routed(budget.layers)
    taken = int(stack.expert.size_bytes[stack.moe[rows]] @ mask[rows].sum(axis=1))
    return SegmentPlan(
        budget.gpu, budget.layers, replace(budget.need, experts=taken), budget.limit_bytes
    )


def simulated(hybrid: Hybrid, depth: int, position: int) -> Simulation:
    """Returns the simulation of a decode step of one token at `position` with up to `depth` of its experts deferred:
    the spans of time in which GPU and CPU work or wait, and the step's seconds.
    """
    return simulate(hybrid.layers(position), depth, hybrid.head_s())


# --- decisions --------------------------------------------------------------------------------------


def _wants_stream(case: _Case) -> bool:
    """Returns whether memory is set aside for streaming: if it would be faster for the longest chunk with nothing
    on the GPU. The GPU's free memory has no say, so that more of it never means fewer experts.

    Raises:
        UsageError: it is asked for, but the CPU has MLPs.
    """
    asked = case.request.prefill_threshold
    if case.apart:  # the CPU takes too few tokens at once where it has a part of every token's way
        if asked not in (None, NEVER):
            raise _no_streams(case)
        return False
    if asked is not None:
        return asked != NEVER
    mask = case.stack.room(0).empty
    hybrid = case.hybrid(mask, experts.hits(mask, case.stack.top_k))
    sizes = case.devices.sizes(range(case.stack.layers))
    buffer = sizes.buffer_bytes // max(1, sizes.expert_bytes)
    return Prefill(hybrid, chunk_limit(case.context), buffer).threshold() != NEVER


def _no_streams(case: _Case) -> UsageError:
    """The error of streaming that is asked for where the CPU has MLPs."""
    layer, part = min(case.apart, key=lambda each: each.layer)
    return UsageError(
        f"--prefill-threshold {case.request.prefill_threshold} streams long prompts, but the placement rules keep the"
        f" {part.value} of layer {layer} in main memory",
        hint="leave out --prefill-threshold: such a model reads prompts in pieces that the CPU takes",
    )


def _chosen(case: _Case, budgets: Sequence[Budget]) -> tuple[ResidentChoice, tuple[Budget, ...]]:
    """Chooses the mask, and the budgets that go with it: nothing is streamed to a GPU that has all experts of its
    layers, and what that frees counts where then all experts of the model find room."""
    choice, stack = case.request.gpu_experts, case.stack
    whole = [each.without_stream() for each in budgets]
    rooms = [stack.room(each.experts_bytes, each.layers) for each in whole]
    every = choice is None or (isinstance(choice, int) and choice == stack.experts)
    every = every and (case.constraints is None or not (case.constraints.experts == 0).any())
    if not (every and all(room.all_bytes <= room.budget_bytes for room in rooms)):
        rooms = [stack.room(each.experts_bytes, each.layers) for each in budgets]
    fit = all(room.all_bytes <= room.budget_bytes for room in rooms)
    worth = case.devices.worth
    most = 1.0 if fit and worth.all else worth.some
    chosen = [
        _chosen_on(case, budget, room, most) for room, budget in zip(rooms, budgets, strict=True)
    ]
    kept = zip(chosen, budgets, whole, strict=True)
    rules = [each.rule for each in chosen if not each.mask.all()] or ["all"]
    mask = np.concatenate([each.mask for each in chosen])
    reason = next((each.reason for each in chosen if each.reason), "")
    taken = tuple(less if each.mask.all() else budget for each, budget, less in kept)
    return ResidentChoice(mask, rules[0], reason), taken


def _chosen_on(case: _Case, budget: Budget, room: experts.Room, most: float) -> ResidentChoice:
    """Chooses the experts of one GPU: those that rules place there, and in what is left as if there were no others."""
    rows = case.stack.routed(budget.layers)
    choice, heat = _rows(case.request.gpu_experts, rows), _rows(case.request.heat, rows)
    if case.constraints is None:
        return experts.choose(choice, heat, room, most)
    resident, free = case.constraints.resident[rows], case.constraints.free[rows]
    if resident.all():  # nothing is streamed to it
        room = case.stack.room(budget.without_stream().experts_bytes, budget.layers)
    sizes = np.array(room.sizes, np.int64)
    left = room.budget_bytes - int(resident.sum(axis=1) @ sizes)
    if left < 0:
        raise _rules_too_large(budget, room.budget_bytes - left, room.budget_bytes)
    some = np.flatnonzero(free.any(axis=1))
    mask, rule, reason = resident.copy(), "rules", ""
    if some.size:
        among = experts.Room(tuple(sizes[some].tolist()), room.experts, left)
        chosen = experts.choose(_rows(choice, some), _rows(heat, some), among, most)
        mask[some] |= chosen.mask & free[some]
        rule, reason = chosen.rule if free.all() else "rules", chosen.reason
    return ResidentChoice(mask, rule, reason)


def _rules_too_large(budget: Budget, need: int, room: int) -> NotEnoughMemory:
    what = (
        f"the experts that rules place on cuda:{budget.gpu.index}, beside what every token needs,"
    )
    return NotEnoughMemory(
        what, budget.need.total + need, budget.need.total + room, hint="place fewer of them there"
    )


def _rows(given: Any, rows: Any) -> Any:
    """A choice or a heat map for some layers; what has no rows is for any."""
    return given[rows] if isinstance(given, np.ndarray) else given


def _threshold(case: _Case, prefill: Prefill, choice: ResidentChoice) -> int:
    asked = case.request.prefill_threshold
    if not prefill.buffer_experts or choice.mask.all():
        return NEVER
    return prefill.threshold() if asked is None else asked


def _depths(case: _Case, hybrid: Hybrid) -> tuple[tuple[int, int], ...]:
    """The positions at which the depth of deferral changes, each with its depth from there on."""
    if case.request.defer is not None:
        return ((0, case.request.defer),)
    if case.apart:  # the GPU waits for what comes behind the deferred experts
        return ((0, 0),)
    found: list[tuple[int, int]] = []
    hits = hybrid.mean_hits()
    for start in deferral.context_buckets(case.context):
        times = hybrid.times(max(start, MEASURED_AT))
        depth = deferral.depth(times, hits, case.stack.deferrable)
        if not found or found[-1][1] != depth:
            found.append((start, depth))
    return tuple(found)


def _too_small(case: _Case, budgets: Sequence[Budget]) -> NotEnoughMemory:
    shorter = case.devices.fitting(case.context)
    hint = f"--context {shorter} fits; --device cpu" if shorter >= LEAST_CONTEXT else "--device cpu"
    worst = min(budgets, key=lambda each: each.experts_bytes)
    layers = "" if len(budgets) == 1 else f" of layers {worst.layers.start}-{worst.layers.stop - 1}"
    what = f"everything but the experts{layers}, with {case.context} positions on {worst.gpu.name},"
    return NotEnoughMemory(what, worst.need.total, worst.limit_bytes, hint=hint)


# --- the plan ---------------------------------------------------------------------------------------


def _assembled(
    case: _Case, device: DevicePlan, prefill: Prefill, choice: ResidentChoice, speed: Speed
) -> Plan:
    model, host, recipe = case.model, case.host, case.request.recipe
    here, there = split(model, choice.mask, case.apart)
    account = HybridAccount(
        model,
        host,
        case.request,
        case.stack,
        case.context,
        device,
        prefill,
        choice,
        here,
        there,
        case.experts_on,
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
        nodes=node_needs(here, recipe, host.teams, host.nodes, others, case.experts_on)
        if host.nodes
        else (),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams)), here.tensors),
        device=replace(device, reasons=tuple(account.reasons())),
        notes=host.notes,
        use=case.request.use,
        experts_on=case.experts_on,
    )
