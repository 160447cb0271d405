"""Loading a model with a GPU, where there is one that can be used and the plan wants it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.assembly.device_words import DeviceWords
from ktcli.errors import DeviceError
from ktcli.hardware import measured
from ktcli.hardware.gpu import AUTO, CPU, torch_installed
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.numa import OFF, Numa, asked_numa
from ktcli.hardware.probe import probe
from ktcli.hardware.team import forced_size, on_nodes
from ktcli.models import Model, Spec, build
from ktcli.output import out
from ktcli.planner.deferral import Times
from ktcli.planner.host import Host, host_of
from ktcli.planner.placement import candidate, is_small, place
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.store import experience, heat, library
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from ktcli.assembly.prepare import Ready, Wanted
    from ktcli.engine.device.engine import DeviceEngine


def load_on_gpu(ready: Ready, wanted: Wanted) -> DeviceEngine | None:
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
    machine = probe()
    if not usable(machine, wanted.device.device):
        return None
    numa = wanted.numa or asked_numa(None)
    planner = _Planner(model, host_here(machine, wanted.threads, numa, torch=True), numa)
    request = wanted.device.apply(Request(pack.recipe, wanted.context), model.spec)
    known = informed(request, ready.pack, model.spec, machine.gpus)
    return _load(ready, pack, planner, known)


def plan_ahead(model: Model, recipe: Recipe, wanted: Wanted) -> Plan:
    """Where a model would go that is not converted yet.

    Raises:
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    machine, words = probe(), wanted.device
    if wanted.exact:
        words = DeviceWords(device=CPU)
    elif words.device not in (AUTO, CPU):
        usable(machine, words.device)
    numa = OFF if wanted.exact else wanted.numa or asked_numa(None)
    torch = words.device != CPU and torch_installed()
    host = host_here(machine, wanted.threads, numa, torch=torch)
    return place(model, host, words.apply(Request(recipe, wanted.context), model.spec))


def host_here(machine: Machine, threads: int | None, numa: Numa, *, torch: bool) -> Host:
    """What the planner needs of the machine this runs on, as the environment and these options want it.

    Args:
        threads: None: as KT_THREADS says.
        torch: PyTorch is there.
    Raises:
        UsageError: more threads than cores, or `numa` names nodes that cannot be used.
    """
    forced = forced_size(on_nodes(machine.nodes, machine.cpu, numa), threads)
    return host_of(machine, threads=forced, isa=config.forced_isa(), numa=numa, torch=torch)


def usable(machine: Machine, asked: str) -> bool:
    """Whether there is a GPU that torch can use; says why not, where one is there.

    Raises:
        DeviceError: one was asked for.
    """
    if not machine.gpus:
        if asked == AUTO:
            return False
        raise DeviceError(
            f"--device {asked[:40]} asks for a GPU, and no NVIDIA GPU answers here",
            hint="kt doctor shows what was found; --device cpu runs without one",
        )
    # CUDA's own order puts fast GPUs first; the driver's tool, whose numbers are shown, goes by slot.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    from ktcli.engine.device.usable import why_not

    reason = why_not()
    if reason and asked != AUTO:
        raise DeviceError(f"{machine.gpus[0].name} cannot be used: {reason}")
    if reason:
        out.warn(f"{machine.gpus[0].name} is not used: {reason}")
    return not reason


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans of one model on this machine."""

    model: Model
    host: Host
    numa: Numa

    def place(self, request: Request) -> Plan:
        return place(self.model, self.host, request)


def informed(request: Request, pack: Path, spec: Spec, gpus: Sequence[Gpu]) -> Request:
    """A request with what is known of a converted model here: which experts are hot, how much memory of a
    GPU it was given, how long a layer takes."""
    found = heat.read(pack, (spec.moe_layers, spec.experts), out.warn)
    known = replace(request, heat=None if found is None else found.counts)
    gpu = candidate(gpus, request.device)
    if gpu is None:
        return known
    past = experience.recall(library.conversion_name(pack), gpu.name, gpu.free_bytes)
    times = None if past.layer_s is None else Times(*past.layer_s)
    return replace(known, vram_bytes=past.limit_bytes, times=times)


def torch_device(index: int) -> torch.device:
    """What torch calls a GPU of this machine."""
    import torch

    return torch.device("cuda", index)


def _load(ready: Ready, pack: Pack, planner: _Planner, request: Request) -> DeviceEngine | None:
    from ktcli.engine.device.load import Attempt, load

    plan = planner.place(request)
    if plan.device is None:
        return None
    gpu = plan.device.gpu
    with out.progress(f"Loading {ready.name}") as bar:
        attempt = Attempt(
            pack,
            planner.model,
            planner.place,
            planner.numa,
            say=out.warn,
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
    out.note(_words(device, loaded.engine))
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


def measure_gpus(gpus: Sequence[Gpu]) -> Iterator[Gpu]:
    """Each with its rates, measured now and kept, as far as torch can use it."""
    from ktcli.engine.device.usable import why_not

    reason = why_not() if gpus else ""
    for gpu in gpus:
        if reason:
            out.warn(f"{gpu.name} is not measured: {reason}")
            yield gpu
            continue
        from ktcli.measure.device_ceilings import measure_rates

        out.note(f"  {gpu.name} …")
        try:
            found = measure_rates(torch_device(gpu.index))
        except DeviceError as error:
            out.warn(f"{gpu.name} is not measured: {error}")
            yield gpu
            continue
        made = replace(
            gpu, read_bps=found.read_bps, bf16_ops=found.bf16_ops, copy_bps=found.copy_bps
        )
        measured.save_gpu(made)
        yield made
