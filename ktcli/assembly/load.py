"""Loads a converted model as a running engine according to the plan: on the CPU, or also on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ktcli.assembly.adapted import read_adapter, with_room
from ktcli.assembly.host import torch_device
from ktcli.assembly.listener import SILENT, Bar, Listener
from ktcli.assembly.planner import Planner, planner_of
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.engine import CpuEngine, Engine
from ktcli.engine.loader import PackSource, Progress
from ktcli.models import build
from ktcli.planner.plan import DevicePlan, Plan
from ktcli.store import contents, experience, library, places, usage
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter
    from ktcli.engine.device.engine import DeviceEngine

QUICK_BYTES = 256 << 20  # loaded in a blink: no progress bar
WHAT = "the model with its context"  # that a machine is too small for


def load(ready: Ready, wanted: Wanted, listener: Listener = SILENT) -> Engine:
    """Loads a converted model onto the CPU, or also GPUs, as its plan says; returns its engine.

    Raises:
        UsageError: an option does not fit this model or machine.
        NotEnoughMemory: the plan does not fit; nothing was loaded.
        DeviceError: a GPU was asked for and cannot be used.
        BadPack: the files are damaged. NotFound, BadCheckpoint: as `with_room`.
    """
    with library.repairable(ready.pack):
        pack = Pack.open(ready.pack)
        model = build(pack.config)
        wanted = with_room(ready, wanted, model)
        planner = planner_of(model, pack.recipe, wanted, ready.pack, listener)
        plan = planner.place()
        _note_use(ready.pack, listener)
        adapter = read_adapter(ready, pack, exact=wanted.exact, listener=listener)
        engine: Engine | None = None
        if plan.device is not None:
            plan, engine = _with_device(ready, pack, planner, plan, listener, adapter)
        if engine is None:
            for option in wanted.device.of_gpu():
                listener.warn(
                    f"{option} applies only to a GPU, and none is used here: it has no effect"
                )
            with _bar(ready, listener) as bar:
                engine = _on_cpu(pack, planner, plan, partial(_show, bar), adapter)
    for warning in engine.warnings:
        listener.warn(warning)
    return engine


def _note_use(pack: Path, listener: Listener) -> None:
    """Notes that a conversion is used, and warns where its weights are others than at its first use: sizes and times
    tell nothing of files that were copied over them, and all of their bytes would take minutes."""
    sample = contents.sample(contents.weights(pack))
    if not usage.note(places.conversion_name(pack), library.identity(pack), sample):
        listener.warn(
            f"the weights in {pack} have changed since they were first used; "
            f"kt verify {pack} compares every byte with its hash"
        )


def _on_cpu(
    pack: Pack, planner: Planner, plan: Plan, progress: Progress, adapter: PackedAdapter | None
) -> CpuEngine:
    plan.require(WHAT)
    pool = planner.start(plan.host)
    source = PackSource.planned(pack, pool, plan)
    return CpuEngine(planner.model, source, pool, plan, progress, adapter)


def _bar(ready: Ready, listener: Listener) -> AbstractContextManager[Bar]:
    """Opens the progress bar of a load; nothing is shown for a model that loads in a blink."""
    size = contents.bytes_below(ready.pack)
    quick = size < QUICK_BYTES
    return (SILENT if quick else listener).progress(f"Loading {ready.name}")


def _show(bar: Bar, done: int, total: int) -> None:
    bar.update(done=done, total=total)


# --- with a GPU -------------------------------------------------------------------------------------


def _with_device(
    ready: Ready,
    pack: Pack,
    planner: Planner,
    plan: Plan,
    listener: Listener,
    adapter: PackedAdapter | None,
) -> tuple[Plan, DeviceEngine | None]:
    """Loads an engine with a GPU; returns the plan it follows, and None as the engine if the GPU is too small."""
    from ktcli.assembly.known_failures import known_failures_of
    from ktcli.assembly.load_device import Attempt, load_as_planned

    assert plan.device is not None
    conversion = places.conversion_name(ready.pack)
    with listener.progress(f"Loading {ready.name}") as bar:
        attempt = Attempt(
            pack,
            planner,
            say=listener.warn,
            note=listener.note,
            known_failures=partial(known_failures_of, conversion),
            progress=partial(_show, bar),
            adapter=adapter,
        )
        loaded = load_as_planned(attempt, plan, torch_device)
    device = loaded.plan.device
    if loaded.engine is None or device is None:
        return loaded.plan, None
    if loaded.lowered:
        for each in device.segments:
            where = experience.one_of(each.gpu.name, each.gpu.index)
            experience.note_memory(conversion, where, each.gpu.free_bytes, each.need.total)
    if loaded.measured is not None:
        experience.note_times(conversion, device.gpus[0].name, astuple(loaded.measured))
    listener.note(_words(device, loaded.engine))
    return loaded.plan, loaded.engine


def _words(device: DevicePlan, engine: DeviceEngine) -> str:
    """The text of what the GPUs hold: "H200: everything except experts, plus 12 of 64 experts (31% of the choices)"."""
    mask = device.mask
    here, depth = int(mask.sum()), engine.depth_at(0)
    apart = " and ".join(sorted({f"{each.part.value}" for each in device.apart}))
    if here == mask.size:
        return f"{device.names}: {f'everything except {apart}' if apart else 'the whole model'}"
    of_these = f"{here:,} of {mask.size:,} experts ({device.hit_rate:.0%} of the choices)"
    deferral = f"; up to {depth} of each token's experts finish one layer later" if depth else ""
    without = f"experts, {apart}" if apart else "experts"
    return f"{device.names}: everything except {without}, plus {of_these}{deferral}"
