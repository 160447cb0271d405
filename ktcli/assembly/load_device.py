"""Loads an engine as planned, or falls back step by step if a device has less memory than planned."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ktcli.assembly.planner import Planner
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.fallbacks import KnownFailures
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.stream import device_errors
from ktcli.engine.loader import PackSource, Progress
from ktcli.errors import DeviceError, OutOfDeviceMemory
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.hardware.machine import Gpu
from ktcli.measure.layer_times import layer_times
from ktcli.ops.torch.kernels import compiled_before
from ktcli.planner.deferral import Times
from ktcli.planner.lower import Lower, step_down
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.records import dataclass
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


@dataclass(frozen=True, slots=True)
class Attempt:
    """The model to load, and what is needed to find the next smaller attempt.

    Attributes:
        say: called with a sentence for every step down.
        note: called with a sentence when something takes long.
        known_failures: finds what is known to fail on the GPUs that an attempt uses.
        adapter: the adapter of all sequences, for which the plan has room; None: they have none.
    """

    pack: Pack
    planner: Planner
    say: Callable[[str], object]
    note: Callable[[str], object]
    known_failures: Callable[[Sequence[Gpu]], KnownFailures]
    progress: Progress | None = None
    adapter: PackedAdapter | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The outcome of a load.

    Attributes:
        engine: the engine; None: the devices are too small, and the CPU is to do everything.
        plan: the plan that the engine follows.
        lowered: whether the devices' memory was not enough for the first plan.
        measured: the measured times of a layer; None: they cannot be measured.
    """

    engine: DeviceEngine | None
    plan: Plan
    lowered: bool
    measured: Times | None = None


def load_as_planned(
    attempt: Attempt, plan: Plan, device_of: Callable[[int], torch.device]
) -> Loaded:
    """Loads a model on the GPUs as the plan says, or by smaller and smaller plans until the GPUs hold one; returns the
    engine with the plan that it follows. The engine is None if the plan uses only the CPU.

    Args:
        device_of: the torch device of a GPU's number.
    Raises:
        NotEnoughMemory: main memory does not suffice.
        DeviceError: a GPU that was asked for, or any under placement rules, failed other than by full memory.
    """
    request, lowered = attempt.planner.request, False
    while plan.device is not None:
        devices = [device_of(gpu.index) for gpu in plan.device.gpus]
        try:
            engine = _try(attempt, plan, plan.device, devices)
            if engine is not None:
                return _timed(attempt, request, Loaded(engine, plan, lowered))
            lower = step_down(attempt.planner.model, request, plan)
        except DeviceError as error:
            if request.device != AUTO or request.rules is not None:
                raise
            sentence = f"{plan.device.names} is not used: {error}"
            lower = Lower(replace(request, device=CPU), sentence)
        engine = None  # what it holds is free for the next
        release(devices)
        assert lower is not None
        attempt.say(lower.sentence)
        request, lowered = lower.request, True
        plan = attempt.planner.place(request)
    return Loaded(None, plan, lowered)


def _timed(attempt: Attempt, request: Request, loaded: Loaded) -> Loaded:
    """Sets the depths of deferral from times measured now: another number of threads has others."""
    engine, device = loaded.engine, loaded.plan.device
    if engine is None or device is None:
        return loaded
    times = layer_times(engine)
    if times is None:
        return loaded
    again = attempt.planner.place(replace(request, times=times)).device
    if again is not None:
        engine.follow(again.depths)
    return replace(loaded, measured=times)


def _has_room(devices: Sequence[torch.device], planned: DevicePlan) -> bool:
    """Returns whether the memory left after the load suffices for prompts: kernels, graphs and libraries have taken
    theirs by now, which the plan could only assume."""
    pairs = zip(map(left_bytes, devices), planned.segments, strict=True)
    return all(left is None or left >= segment.need.workspace for left, segment in pairs)


def left_bytes(device: torch.device) -> int | None:
    """Returns the bytes of a device's memory that are free, or cached by torch; None: the device is no GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def release(devices: Sequence[torch.device]) -> None:
    """Frees the memory that a failed attempt to load a model still holds on the devices: collects garbage, and empties
    torch's CUDA caches.
    """
    gc.collect()  # the error's frames held tensors in cycles
    if any(device.type == "cuda" for device in devices):
        with suppress(RuntimeError):  # one that has failed takes nothing back
            torch._C._cuda_clearCublasWorkspaces()  # which outlast whatever asked for them
            torch.cuda.empty_cache()


def _try(
    attempt: Attempt, plan: Plan, planned: DevicePlan, devices: Sequence[torch.device]
) -> DeviceEngine | None:
    """Tries one load; returns None if the devices' memory is not enough, or what is left of it.

    Raises:
        NotEnoughMemory: main memory does not suffice.
        DeviceError: a device failed otherwise.
    """
    plan.require("the model with its context")
    pool = attempt.planner.start(plan.host)
    source = PackSource.planned(attempt.pack, pool, plan)
    if devices[0].type == "cuda" and not compiled_before():
        attempt.note("GPU kernels are compiled once, after loading, which takes about 20 seconds")
    model, use = attempt.planner.model, plan.use
    every = model.spec.embeds or use.all_logits
    try:
        engine = DeviceEngine(
            model,
            plan.recipe,
            source,
            pool,
            Placement.of(plan, planned),
            devices,
            max_outputs=use.outputs(model.spec, plan.context) if every else use.streams,
            progress=attempt.progress,
            known_failures=attempt.known_failures(planned.gpus),
            adapter=attempt.adapter,
        )
        with device_errors("loading"):
            return engine if _has_room(devices, planned) else None
    except OutOfDeviceMemory:
        return None
