"""The plan of a model on this machine, with what earlier runs taught about both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ktcli.assembly.host import host_here, machine_here, usable
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.hardware.gpu import AUTO, CPU, torch_installed
from ktcli.hardware.machine import Gpu
from ktcli.hardware.numa import OFF, asked_numa
from ktcli.models import Model, Spec
from ktcli.planner.deferral import Times
from ktcli.planner.placement import candidate, place
from ktcli.planner.plan import Plan, Request
from ktcli.store import experience, heat, library
from ktcli.weights.recipe import Recipe


def plan_ahead(model: Model, recipe: Recipe, wanted: Wanted, listener: Listener = SILENT) -> Plan:
    """Where a model would go that is not converted yet.

    Raises:
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
        NotEnoughMemory: a GPU was asked for that cannot hold what must lie on it.
    """
    machine, words = machine_here(), wanted.device
    if wanted.exact:
        words = DeviceWords(device=CPU)
    elif words.device not in (AUTO, CPU):
        usable(machine, words.device, listener)
    numa = OFF if wanted.exact else wanted.numa or asked_numa(None)
    torch = words.device != CPU and torch_installed()
    host = host_here(machine, wanted.threads, numa, torch=torch)
    return place(model, host, words.apply(Request(recipe, wanted.context), model.spec))


def informed(
    request: Request,
    pack: Path,
    spec: Spec,
    gpus: Sequence[Gpu],
    warn: Callable[[str], object] = SILENT.warn,
) -> Request:
    """A request with what is known of a converted model here: which experts are hot, how much memory of a
    GPU it was given, how long a layer takes."""
    found = heat.read(pack, (spec.moe_layers, spec.experts), warn)
    known = replace(request, heat=None if found is None else found.counts)
    gpu = candidate(gpus, request.device)
    if gpu is None:
        return known
    past = experience.recall(library.conversion_name(pack), gpu.name, gpu.free_bytes)
    times = None if past.layer_s is None else Times(*past.layer_s)
    return replace(known, vram_bytes=past.limit_bytes, times=times)
