"""From a converted model to a running engine: with a GPU where one can be used and the plan wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from ktcli.assembly.host import host_here, machine_here, torch_device, usable
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.plan import informed
from ktcli.assembly.prepare import Ready
from ktcli.assembly.request import Wanted
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.hardware.numa import Numa, asked_numa
from ktcli.models import Model, build
from ktcli.planner.deferral import require
from ktcli.planner.host import Host
from ktcli.planner.placement import is_small, place
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.store import experience, library
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.engine import Engine
    from ktcli.engine.device.engine import DeviceEngine

QUICK_BYTES = 256 << 20  # loaded in a blink: no progress bar


def load(ready: Ready, wanted: Wanted, listener: Listener = SILENT) -> Engine | DeviceEngine:
    """Load a prepared model where it is to run.

    Raises:
        DeviceError: a GPU was asked for and cannot be used.
    """
    engine: Engine | DeviceEngine | None = load_on_gpu(ready, wanted, listener)
    if engine is None:
        for option in wanted.device.of_gpu():
            listener.warn(f"{option} is about a GPU, and none is used here: it changes nothing")
        engine = _load_on_cpu(ready, wanted, listener)
    for warning in engine.warnings:
        listener.warn(warning)
    return engine


def _load_on_cpu(ready: Ready, wanted: Wanted, listener: Listener) -> Engine:
    from ktcli.engine import Engine

    if wanted.device.defer:
        require(wanted.device.defer, build(Pack.open(ready.pack).config).spec.top_k)

    def read(progress: Callable[[int, int], None] | None) -> Engine:
        return Engine.load(
            ready.pack,
            context=wanted.context,
            threads=wanted.threads,
            exact=wanted.exact,
            all_logits=wanted.all_logits,
            defer=wanted.device.defer or 0,
            kv_f32=wanted.kv_f32,
            numa=wanted.numa,
            progress=progress,
        )

    if sum(status.st_size for _, status in library.walk(ready.pack)) < QUICK_BYTES:
        return read(None)
    with listener.progress(f"Loading {ready.name}") as bar:
        return read(lambda done, total: bar.update(done=done, total=total))


# --- with a GPU -------------------------------------------------------------------------------------


def load_on_gpu(ready: Ready, wanted: Wanted, listener: Listener = SILENT) -> DeviceEngine | None:
    """The engine with a GPU; None: the CPU is to do everything.

    Raises:
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    if wanted.device.device == CPU or wanted.exact:
        return None
    pack = Pack.open(ready.pack)
    model = build(pack.config)
    if wanted.device.device == AUTO and is_small(model, pack.recipe):
        return None  # before torch is asked, which takes seconds
    machine = machine_here()
    if not usable(machine, wanted.device.device, listener):
        return None
    numa = wanted.numa or asked_numa(None)
    planner = _Planner(model, host_here(machine, wanted.threads, numa, torch=True), numa)
    request = wanted.device.apply(Request(pack.recipe, wanted.context), model.spec)
    known = informed(request, ready.pack, model.spec, machine.gpus, listener.warn)
    return _load(ready, pack, planner, known, listener)


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans of one model on this machine."""

    model: Model
    host: Host
    numa: Numa

    def place(self, request: Request) -> Plan:
        return place(self.model, self.host, request)


def _load(
    ready: Ready, pack: Pack, planner: _Planner, request: Request, listener: Listener
) -> DeviceEngine | None:
    from ktcli.engine.device.load import Attempt, load

    plan = planner.place(request)
    if plan.device is None:
        return None
    gpu = plan.device.gpu
    with listener.progress(f"Loading {ready.name}") as bar:
        attempt = Attempt(
            pack,
            planner.model,
            planner.place,
            planner.numa,
            say=listener.warn,
            progress=lambda done, total: bar.update(done=done, total=total),
        )
        loaded = load(attempt, request, torch_device(gpu.index))
    if loaded.engine is None:
        return None
    device = loaded.plan.device
    assert device is not None
    conversion = library.conversion_name(ready.pack)
    if loaded.lowered:
        experience.note_memory(conversion, gpu.name, gpu.free_bytes, device.need.total)
    if loaded.measured is not None:
        experience.note_times(conversion, gpu.name, astuple(loaded.measured))
    listener.note(_words(device, loaded.engine))
    return loaded.engine


def _words(device: DevicePlan, engine: DeviceEngine) -> str:
    """What the GPU has: "NVIDIA H200: all but the experts, and 1,234 of 6,144 of these (31% of the choices)"."""
    mask = device.mask
    here, depth = int(mask.sum()), engine.depth_at(0)
    if here == mask.size:
        return f"{device.gpu.name}: the whole model"
    of_these = f"{here:,} of {mask.size:,} of these ({device.hit_rate:.0%} of the choices)"
    late = f"; up to {depth} of a token's come a layer later" if depth else ""
    return f"{device.gpu.name}: all but the experts, and {of_these}{late}"
