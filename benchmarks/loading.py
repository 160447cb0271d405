"""Engines on the CPU of this machine, of a conversion in any folder or of random weights, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktcli.assembly.host import machine_here
from ktcli.assembly.load import WHAT
from ktcli.assembly.planner import host_for, planner_of
from ktcli.assembly.request import Wanted
from ktcli.engine import CpuEngine
from ktcli.engine.loader import PackSource, Progress
from ktcli.hardware.gpu import CPU
from ktcli.measure.synthetic import fitting_plan, random_engine
from ktcli.measure.tiles import planned_team
from ktcli.models import build
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


def load_pack(
    path: Path,
    wanted: Wanted | None = None,
    progress: Progress | None = None,
    adapter: PackedAdapter | None = None,
) -> CpuEngine:
    """Returns the engine of the conversion in a folder, loaded with every layer on the CPU.

    Args:
        progress: called with the bytes that are placed and their total.
        adapter: the adapter of all sequences, for which `wanted` has room.
    Raises:
        UsageError, NotEnoughMemory, BadPack: as `ktcli.assembly.load.load`.
    """
    pack = Pack.open(path)
    planner = planner_of(build(pack.config), pack.recipe, wanted or Wanted(), path)
    plan = planner.place()
    plan.require(WHAT)
    pool = planner.start(plan.host)
    source = PackSource.planned(pack, pool, plan)
    return CpuEngine(planner.model, source, pool, plan, progress, adapter)


def load_random(
    config: Mapping[str, Any], recipe: Recipe, wanted: Wanted, layers: int | None = None
) -> CpuEngine:
    """Returns an engine of a config's shapes with random weights on the CPU.

    Args:
        layers: the number of decoder layers; None: as many as fit.
    Raises:
        UsageError, NotEnoughMemory: as `fitting_plan`.
    """
    machine = machine_here(gpus=False)
    host = host_for(machine, wanted, torch=False)
    request = wanted.request(recipe, build(config).spec, CPU)
    model, plan = fitting_plan(config, host, request, layers)
    return random_engine(model, plan, planned_team(machine.cpu, plan.host))
