"""Engines for tests, planned by the planner like any other: of a conversion, or on a pool of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from shapes import RATES

from benchmarks.loading import load_pack
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.engine import CpuEngine
from ktcli.engine.loader import PackSource, Progress, TensorSource
from ktcli.hardware.gpu import CPU
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.planner.cost import has_tiles
from ktcli.planner.host import Host
from ktcli.planner.memory import TALK, Use
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe

PLENTY = 1 << 50  # bytes of memory


def load_engine(
    path: Path, *, defer: int = 0, progress: Progress | None = None, **wanted: object
) -> CpuEngine:
    """A conversion on the CPU of this machine; the keywords are those of `Wanted`."""
    words = DeviceWords(device=CPU, defer=defer)
    return load_pack(path, Wanted(device=words, **wanted), progress)  # type: ignore[arg-type]


@contextlib.contextmanager
def without_tiles() -> Iterator[None]:
    """Opens a context in which engines multiply without tiles, which round by the number of rows: only then do
    drafts and windows share steps."""
    with pytest.MonkeyPatch.context() as patch:
        if has_tiles(Pool(1).isa):
            patch.setenv("KT_ISA", "avx512")
        yield


def plan_for(
    model: Model, pool: Pool, recipe: Recipe, context: int | None = None, use: Use = TALK
) -> Plan:
    """The plan of a model on a machine with plenty of memory that would start the teams of `pool`."""
    host = Host("made up", pool.threads, pool.isa, PLENTY, PLENTY, RATES)
    return place(model, host, Request(recipe, context, CPU, use=use))


def engine_on(
    pool: Pool,
    source: TensorSource,
    model: Model,
    recipe: Recipe,
    context: int | None = None,
    use: Use = TALK,
) -> CpuEngine:
    """A model on a pool of the test's own: more threads than cores, or a row by name."""
    return CpuEngine(model, source, pool, plan_for(model, pool, recipe, context, use))


def pack_on(pool: Pool, path: Path, context: int | None = None, use: Use = TALK) -> CpuEngine:
    """The same of a conversion."""
    pack = Pack.open(path)
    return engine_on(pool, PackSource(pack, pool), build(pack.config), pack.recipe, context, use)
