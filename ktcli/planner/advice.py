"""Advises what would make a plan fit that does not, the smallest sacrifice first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ktcli.errors import NotEnoughMemory, gib
from ktcli.hardware.machine import Gpu
from ktcli.models.model import Model
from ktcli.planner.alone import Alone
from ktcli.planner.host import Host
from ktcli.planner.hybrid import plan_with
from ktcli.planner.memory import (
    LEAST_CONTEXT,
    fitting_context,
)
from ktcli.planner.nodes import NodeNeed
from ktcli.planner.plan import Plan, Request
from ktcli.weights.formats import steps_from
from ktcli.weights.recipe import Recipe


def advice_alone(alone: Alone, context: int) -> Iterator[str]:
    """Yields sentences on what would make a plan for the CPU fit, the smallest sacrifice first."""
    host = alone.host
    shorter = fitting_context(alone.model, alone.recipe, alone.room_bytes, alone.use)
    if shorter >= LEAST_CONTEXT:
        yield f"--context {shorter} fits"
    if host.nodes and alone.need_bytes(context) <= host.room_bytes:
        yield "--numa off fits, but reads most weights from far memory"
    for smaller in _smaller(alone.recipe):
        if replace(alone, recipe=smaller).fits(context):
            yield f"--experts {smaller.experts_name} --dense {smaller.dense.name} fits"
            break
    missing = alone.total_bytes(context) - host.available_bytes
    yield from _more_memory(missing, alone.node_needs(context))


def advice_with(
    model: Model, host: Host, gpus: Sequence[Gpu], request: Request, made: Plan
) -> Iterator[str]:
    """Yields sentences on what would make a plan with GPUs fit into main memory."""
    assert host.beside is not None
    alone = Alone.of(model, host, request)
    if alone.fits(alone.context(request.context)):
        yield "--device cpu fits"
    for smaller in _smaller(request.recipe):
        try:
            fits = plan_with(model, host.beside, gpus, replace(request, recipe=smaller)).fits
        except NotEnoughMemory:
            continue
        if fits:
            yield f"--experts {smaller.experts_name} --dense {smaller.dense.name} fits"
            break
    yield from _more_memory(made.need_bytes - made.host.available_bytes, made.nodes)


def _more_memory(missing_bytes: int, nodes: Iterable[NodeNeed]) -> Iterator[str]:
    """Yields how much more must be free in all, or else on the nodes that are too full."""
    if missing_bytes > 0:
        yield f"{gib(missing_bytes)} more memory would do"
        return
    for need in nodes:
        if not need.fits:
            yield f"{gib(need.need_bytes - need.free_bytes)} more free on node {need.node} would do"


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Yields recipes that take less memory, the least change first: experts, then dense, then both."""
    usual = Recipe()
    steps = reversed((usual.experts, *steps_from(usual.experts)))  # bf16, int8, int4
    experts = [
        fmt
        for fmt in steps
        if fmt.bits < recipe.experts.bits or (recipe.down and fmt == usual.experts)
    ]
    dense = [usual.dense] if recipe.dense.bits > usual.dense.bits else []
    pairs = [(fmt, recipe.dense) for fmt in experts]
    pairs += [(fmt, small) for small in dense for fmt in [recipe.experts, *experts]]
    plain = replace(recipe, down=None, calibrated=False)
    yield from (replace(plain, experts=first, dense=second) for first, second in pairs)
