"""From a plan to a loaded engine: one step down at a time where the device has less memory than planned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ktcli.engine.cpu import Options, make_pool
from ktcli.engine.device.engine import DeviceEngine, Placement
from ktcli.engine.device.steps import LongPrompts
from ktcli.engine.device.timing import layer_times
from ktcli.engine.loader import PackSource, Progress
from ktcli.errors import OutOfDeviceMemory
from ktcli.hardware.numa import Numa
from ktcli.models import Model
from ktcli.planner.deferral import Times
from ktcli.planner.device import step_down
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.weights.pack import Pack


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is tried, and how the next smaller attempt is found.

    Attributes:
        place: the plan that a request gives.
        numa: of the CPU's part, whose threads are those of the plan.
        say: told in a sentence of every step down.
    """

    pack: Pack
    model: Model
    place: Callable[[Request], Plan]
    numa: Numa | None
    say: Callable[[str], object]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of it.

    Attributes:
        engine: None: the device is too small, and the CPU is to do everything.
        plan: that it follows.
        lowered: the device's memory was not enough for the first plan.
        measured: times of a layer; None: they cannot be seen.
    """

    engine: DeviceEngine | None
    plan: Plan
    lowered: bool
    measured: Times | None = None


def load(attempt: Attempt, request: Request, device: torch.device) -> Loaded:
    """Load a model as the plan for `request` says, or the largest plan below it that the device holds.

    Args:
        device: of torch; its type and number, whatever the plan calls it.
    Raises:
        NotEnoughMemory: main memory does not suffice.
        DeviceError: the device failed otherwise.
    """
    plan, lowered = attempt.place(request), False
    while plan.device is not None:
        engine = _try(attempt, plan, plan.device, device)
        if engine is not None:
            return _timed(attempt, request, Loaded(engine, plan, lowered))
        release(device)
        lower = step_down(request, plan)
        assert lower is not None
        attempt.say(lower.sentence)
        request, lowered = lower.request, True
        plan = attempt.place(request)
    return Loaded(None, plan, lowered)


def _timed(attempt: Attempt, request: Request, loaded: Loaded) -> Loaded:
    """With depths of deferral from times measured now: another number of threads has others."""
    engine, device = loaded.engine, loaded.plan.device
    if engine is None or device is None:
        return loaded
    times = layer_times(engine, device.times.shared_s)
    if times is None:
        return loaded
    again = attempt.place(replace(request, times=times)).device
    if again is not None:
        engine.follow(again.depths)
    return replace(loaded, measured=times)


def placement(plan: Plan, device: DevicePlan) -> Placement:
    """What goes where, as planned."""
    threshold = device.prefill_threshold if device.streams else None
    short = device.chunk if device.mask.all() else PREFILL_CHUNK
    return Placement(
        mask=device.mask,
        context=plan.context,
        depths=device.depths,
        long_prompts=LongPrompts(threshold, device.chunk, short),
        slab_bytes=device.need.stream // 2,
    )


def release(device: torch.device) -> None:
    """Give back what a failed attempt still holds of the device's memory."""
    gc.collect()  # the error's frames held tensors in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _try(
    attempt: Attempt, plan: Plan, planned: DevicePlan, device: torch.device
) -> DeviceEngine | None:
    """None: the device's memory is not enough."""
    plan.require("the model with its context")
    pool = make_pool(Options(threads=plan.host.threads, numa=attempt.numa))
    source = PackSource(attempt.pack, pool)
    try:
        return DeviceEngine(
            attempt.model,
            attempt.pack.recipe,
            source,
            pool,
            placement(plan, planned),
            device,
            progress=attempt.progress,
        )
    except OutOfDeviceMemory:
        return None
