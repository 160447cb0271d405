"""Plans models that are about to be loaded on this machine, with what earlier runs showed about both.

A plan is made once, before anything is loaded, and whatever is loaded follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ktcli.assembly.host import host_here, machine_here, usable, where_now
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.request import Wanted, require_rows
from ktcli.errors import gib
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.numa import OFF
from ktcli.measure.tiles import planned_team
from ktcli.models import Model, Spec
from ktcli.native import Pool
from ktcli.planner.deferral import Times
from ktcli.planner.host import Host
from ktcli.planner.placement import candidates, is_small, place
from ktcli.planner.plan import Plan, Request
from ktcli.records import dataclass
from ktcli.store import experience, heat, places
from ktcli.weights.recipe import Recipe

EXACT_ROW = "portable"  # of kernels: what results are compared with


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans of one model on this machine.

    Attributes:
        machine: the machine as it is now.
        host: the facts of it that the planner uses.
        request: the request that is planned unless another is given.
    """

    model: Model
    machine: Machine
    host: Host
    request: Request

    def place(self, request: Request | None = None) -> Plan:
        """Returns the plan of the model on this machine for a request (None: the planner's own); raises as `place`."""
        return place(self.model, self.host, request or self.request)

    def on(self, available_bytes: int) -> Planner:
        """Returns a copy of the planner for a machine with `available_bytes` of free main memory."""
        return replace(self, host=replace(self.host, available_bytes=available_bytes))

    def start(self, host: Host) -> Pool:
        """Returns a native thread pool with the teams of threads of a plan's host, started."""
        return planned_team(self.machine.cpu, host)


def planner_of(
    model: Model, recipe: Recipe, wanted: Wanted, pack: Path, listener: Listener = SILENT
) -> Planner:
    """Returns the planner of a model that is to be loaded now: this machine as it is, and the request with what earlier
    runs measured.

    Args:
        pack: its conversion, of which earlier runs may know something.
    Raises:
        UsageError: an option does not fit this model or machine.
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
    """
    where = where_now(wanted.where)
    if where == AUTO and wanted.device.placement is None and is_small(model, recipe):
        where = CPU  # before torch is asked, which takes seconds
    machine = machine_here(gpus=where != CPU)
    if where != CPU and not usable(machine, where, listener):
        where = CPU
    host = host_for(machine, wanted, torch=where != CPU)
    request = wanted.request(recipe, model.spec, where)
    if where != CPU:
        request = informed(request, pack, model.spec, machine.gpus, listener.warn)
    return Planner(model, machine, host, request)


def host_for(machine: Machine, wanted: Wanted, *, torch: bool) -> Host:
    """Returns the facts about a machine that the planner uses for an engine with these options: an exact engine runs in
    one team of threads, on the portable row of kernels unless one is named. Raises as `require_rows` and `host_here`.
    """
    row = wanted.row
    require_rows(wanted, machine.cpu.isa)
    if wanted.exact:
        return host_here(machine, wanted.threads, OFF, torch=False, isa=row or EXACT_ROW)
    return host_here(machine, wanted.threads, wanted.numa, torch=torch, isa=row)


def informed(
    request: Request,
    pack: Path,
    spec: Spec,
    gpus: Sequence[Gpu],
    warn: Callable[[str], object] = SILENT.warn,
) -> Request:
    """Returns the request with measurements of earlier runs of a converted model added: which experts are used most,
    how many bytes of each GPU may be used, how long a layer takes. Raises as `candidates`.
    """
    found = heat.read(pack, (spec.moe_layers, spec.experts), warn)
    known = replace(request, heat=None if found is None else found.counts)
    possible, name = candidates(gpus, request), places.conversion_name(pack)
    if not possible:
        return known
    limits = {}
    for gpu in possible:
        where = experience.one_of(gpu.name, gpu.index)
        limit = experience.recall(name, where, gpu.free_bytes).limit_bytes
        if limit is not None:
            limits[gpu.index] = limit
    past = experience.recall(name, possible[0].name, possible[0].free_bytes)
    times = None if past.layer_s is None else Times(*past.layer_s)
    return replace(known, limits=limits, times=times)


def verdict(name: str, plan: Plan, *, free_bytes: int = 0) -> str:
    """Returns a sentence with the memory that a plan needs, the memory that the machine has, and the model's predicted
    speed.

    Args:
        free_bytes: memory that another loaded model holds and would free; counted as available.
    """
    there = ""
    if plan.device:
        whose = "GPU's" if len(plan.device.segments) == 1 else "GPUs'"
        there = f" and {gib(plan.device.need.total)} of the {whose}"
    return (
        f"{name} needs {gib(plan.need_bytes)} of {gib(plan.host.available_bytes + free_bytes)} memory{there}; "
        f"about {plan.speed_words} here (kt plan {name} says why)"
    )
