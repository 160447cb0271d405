"""Finds the next smaller plan if a GPU's memory turned out to be too small."""

from __future__ import annotations

from dataclasses import replace

from ktcli.hardware.gpu import CPU
from ktcli.models.model import Model
from ktcli.native import PAGE_TOKENS
from ktcli.planner.device import DeviceSizes, share_out
from ktcli.planner.memory import LEAST_CONTEXT
from ktcli.planner.plan import Plan, Request, SegmentPlan
from ktcli.planner.stack import stack_of
from ktcli.records import dataclass

# Less would only fail again: the allocator of a GPU works in pieces of 2 MiB and more.
_LEAST_CUT = 64 << 20


@dataclass(frozen=True, slots=True)
class Lower:
    """The next smaller attempt: its request, and a sentence about it."""

    request: Request
    sentence: str


def step_down(model: Model, request: Request, plan: Plan) -> Lower | None:
    """Returns the next smaller request to plan and load after a GPU of `plan` ran out of memory, with a sentence about
    it; None: the plan used no GPU.

    The request has fewer experts on the GPUs; if none were there, half the context; if that is below LEAST_CONTEXT, the
    CPU alone.
    """
    device = plan.device
    if device is None:
        return None
    need = device.need
    if need.experts:
        most = max(device.n_experts)
        limits = {each.gpu.index: _fewer_experts(each, most) for each in device.segments}
        return Lower(
            replace(request, context=plan.context, limits={**request.limits, **limits}),
            f"{device.names} ran out of memory with {sum(device.n_experts):,} experts on it; trying again"
            " with fewer",
        )
    shorter = plan.context // 2 // PAGE_TOKENS * PAGE_TOKENS
    if shorter >= LEAST_CONTEXT:
        limits = {
            each.gpu.index: _half_saved(model, plan, each, shorter) for each in device.segments
        }
        return Lower(
            replace(request, context=shorter, limits={**request.limits, **limits}),
            f"{device.names} ran out of memory; trying again with a context of {shorter} positions"
            f" instead of {plan.context}",
        )
    return Lower(
        replace(request, device=CPU),
        f"{device.names} has too little free memory for this model; every layer runs on the CPU",
    )


def _fewer_experts(segment: SegmentPlan, most: int) -> int:
    """A limit for a GPU with a quarter fewer experts, or one in each layer; `most`: the most that a layer has."""
    need = segment.need
    cut = max(need.experts // 4, min(need.experts, -(-need.experts // most)))
    return need.total - min(max(cut, _LEAST_CUT), need.experts)


def _half_saved(model: Model, plan: Plan, segment: SegmentPlan, context: int) -> int:
    """A limit for a GPU with half of what a shorter context saves on it."""
    apart = plan.device.apart if plan.device else ()
    stack = stack_of(model, plan.recipe, plan.use.cache_format, plan.use.adapters, apart)
    sizes = DeviceSizes.of(model.spec, stack, plan.use.streams, segment.layers)
    before, after = (
        share_out(sizes, segment.gpu, n, streams=False).need.total for n in (plan.context, context)
    )
    return segment.need.total - (before - after) // 2
