"""Decides where every part of a model goes on a machine, whether it fits, and how fast it will be.

`place` is pure: no device, no disk, the same answer every time. Memory is decided first (weights, the
cache for the asked context, scratch, a margin), then time from the roofline in `cost`. Each line of the
plan says its bytes, its reason and its predicted time; a plan that does not fit says what would.
Where memory is bound to NUMA nodes, each node is a memory of its own that must hold its share.
Plans that use a GPU are made in `hybrid`; this is the CPU alone, and the choice between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ktcli.errors import NotEnoughMemory, UsageError, gib
from ktcli.hardware.gpu import AUTO, CPU, parse_device
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import cpu_text
from ktcli.models.model import Model, Spec
from ktcli.ops.kvformat import FP8
from ktcli.planner import deferral
from ktcli.planner.advice import advice_alone, advice_with
from ktcli.planner.alone import Alone
from ktcli.planner.host import Host
from ktcli.planner.hybrid import plan_with
from ktcli.planner.nodes import traffic_bytes
from ktcli.planner.plan import Cost, Plan, Request
from ktcli.planner.prefill import NEVER
from ktcli.planner.spec import (
    weight_bytes,
)
from ktcli.weights.recipe import Recipe

# With `auto` such a model stays on the CPU: it answers before torch and CUDA have started.
SMALL_BYTES = 256 << 20


def place(model: Model, host: Host, request: Request) -> Plan:
    """Plans `model` on `host`.

    Raises:
        UsageError: the request is beyond the model, or of another, or there is no such GPU.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    _check(model.spec, request)
    made = _placed(model, host, request)
    return replace(made, costs=tuple(_costs(model, host, request, made)))


def _check(spec: Spec, request: Request) -> None:
    if request.context is not None and not 1 <= request.context <= spec.context:
        raise UsageError(
            f"a context of {request.context} tokens is not possible:"
            f" this model was made for 1..{spec.context} positions",
            hint=f"use --context {spec.context} or less",
        )
    deferral.require(request.defer, spec.top_k)
    if request.use.cache_format == FP8 and spec.chooses:
        raise UsageError(
            f"{spec.family} cannot have an fp8 cache: its layers attend to chosen positions or to pooled rows,"
            " whose numbers are kept as they are",
            hint="leave out --kv, or use --kv bf16",
        )


def _placed(model: Model, host: Host, request: Request) -> Plan:
    """Makes the plan on a GPU or on the CPU alone, whichever is asked for or faster."""
    gpu = candidate(host.gpus, request.device)
    if gpu is None:
        return _on_cpu(model, host, request, _unused(host.gpus, "as --device cpu asks"))
    others = _unused([each for each in host.gpus if each != gpu], "as one GPU is used")
    if request.device == AUTO and is_small(model, request.recipe):
        return _on_cpu(model, host, request, _unused(host.gpus, "for a model as small as this one"))
    assert host.beside is not None
    try:
        made = plan_with(model, host.beside, gpu, request)
    except NotEnoughMemory as error:
        if request.device != AUTO:
            raise
        return _on_cpu(model, host, request, (f"{error}: every layer runs on the CPU",))
    if request.device == AUTO:
        alone = Alone.of(model, host, request)
        context = alone.context(request.context)
        slower = made.speed.decode < alone.speed(context).decode
        if (slower or not made.fits) and alone.fits(context):
            why = "as the CPU alone is faster" if slower else "as main memory is too small with it"
            return _on_cpu(model, host, request, _unused(host.gpus, why))
    if not made.fits:
        made = replace(made, advice=tuple(advice_with(model, host, gpu, request, made)))
    return replace(made, notes=(*others, *made.notes))


def candidate(gpus: Sequence[Gpu], device: str) -> Gpu | None:
    """The GPU that a request means: the one with most memory free, or the one with that number; None: the CPU.

    Raises:
        UsageError: it cannot be used, or the text means none.
    """
    kind, number = parse_device(device)
    if kind == CPU or (kind == AUTO and not gpus):
        return None
    found = [gpu for gpu in gpus if number is None or gpu.index == number]
    if not found:
        have = ", ".join(f"cuda:{gpu.index}" for gpu in gpus) or "none that can be used"
        raise UsageError(
            f"there is no GPU {device}", hint=f"GPUs here: {have}; kt doctor says more"
        )
    return max(found, key=lambda gpu: (gpu.free_bytes, -gpu.index))


def is_small(model: Model, recipe: Recipe) -> bool:
    """Returns whether a model stays on the CPU with `auto`, whatever GPUs there are."""
    return weight_bytes(model, recipe) < SMALL_BYTES


def _unused(gpus: Sequence[Gpu], why: str) -> tuple[str, ...]:
    """The note on all GPUs that are not used, one sentence; () if there is no GPU."""
    if not gpus:
        return ()
    alike: dict[str, list[int]] = {}
    for gpu in gpus:
        alike.setdefault(f"{gpu.name}, {gib(gpu.vram_bytes)}", []).append(gpu.index)
    each = ", ".join(f"cuda:{cpu_text(ids)} ({kind})" for kind, ids in alike.items())
    return (f"{each} stay{'s' if len(gpus) == 1 else ''} unused, {why}",)


def _on_cpu(model: Model, host: Host, request: Request, notes: Sequence[str]) -> Plan:
    """Makes the plan with every layer on the CPU."""
    recipe, alone = request.recipe, Alone.of(model, host, request)
    context = alone.context(request.context)
    return Plan(
        host=host,
        recipe=recipe,
        context=context,
        lines=tuple(alone.lines(context)),
        need_bytes=alone.total_bytes(context),
        speed=alone.speed(context),
        advice=() if alone.fits(context) else tuple(advice_alone(alone, context)),
        nodes=alone.node_needs(context),
        traffic_bytes=traffic_bytes(model, recipe, max(1, len(host.teams))),
        notes=(*notes, *host.notes),
        use=request.use,
        defer=request.defer or 0,
    )


# --- what was forced --------------------------------------------------------------------------------


def _costs(model: Model, host: Host, request: Request, made: Plan) -> Iterator[Cost]:
    """Yields what each forced option does to the speed, the others left as they are."""
    for option, what, own in _forced(host, request, made):
        plan = _placed(model, host, own)
        before, after = getattr(plan.speed, what), getattr(made.speed, what)
        yield Cost(option, what, before, after)


def _forced(host: Host, request: Request, made: Plan) -> Iterator[tuple[str, str, Request]]:
    """Yields each forced option as typed, the speed it is about, and the request without it."""
    if request.device != AUTO and host.gpus:
        yield f"--device {request.device}", "decode", replace(request, device=AUTO)
    if made.device is None:
        return
    wish, threshold = request.gpu_experts, request.prefill_threshold
    if wish is not None:
        said = "FILE" if isinstance(wish, np.ndarray) else wish
        yield f"--gpu-experts {said}", "decode", replace(request, gpu_experts=None)
    if request.defer is not None:
        yield f"--defer {request.defer}", "decode", replace(request, defer=None)
    if threshold is not None:
        said = "never" if threshold == NEVER else threshold
        own = replace(request, prefill_threshold=None)
        yield f"--prefill-threshold {said}", "prefill", own
