"""Reads the facts about the machine that kt runs on, or about a recorded machine below another root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ktcli import config
from ktcli.errors import NativeError, UsageError
from ktcli.hardware import measured
from ktcli.hardware.amx import ROW, Facts
from ktcli.hardware.cpu import read_cpu, read_signature
from ktcli.hardware.disk import read_disk
from ktcli.hardware.gpu import GpusFound, read_gpus
from ktcli.hardware.machine import Cpu, Machine, Measured, Node
from ktcli.hardware.memory import read_memory, read_nodes
from ktcli.hardware.numa import asked_numa
from ktcli.hardware.team import teams_here
from ktcli.hardware.text import read

SYSTEM_ROOT = Path("/")
T = TypeVar("T")


def probe(root: Path = SYSTEM_ROOT, *, gpus: bool = True) -> Machine:
    """Returns the facts of the machine: CPU, memory, NUMA nodes, GPUs, disk and measured rates.

    Args:
        gpus: whether to look for GPUs.
        root: the folder that holds `proc` and `sys`. For another one than `/` the running system is not asked: there
            are no kernel rows, no disk and no rates.
    """
    here = root == SYSTEM_ROOT
    cpu = read_cpu(root, usable_isa() if here else ())
    if here and cpu.model is None:
        cpu = replace(cpu, model=_asked_name())
    memory = read_memory(root)
    nodes = read_nodes(root, cpu.cores, memory)
    seen = read_gpus(root) if gpus else GpusFound()
    found = seen.gpus
    if here:  # with their rates, where somebody measured them
        found = _if_right(lambda: tuple(map(measured.with_rates, seen.gpus)), found)
    return Machine(
        name="this machine" if here else root.name,
        system=f"Linux {release}" if (release := read(root / "proc/sys/kernel/osrelease")) else "",
        cpu=cpu,
        memory=memory,
        nodes=nodes,
        gpus=found,
        disk=_if_right(lambda: read_disk(config.home()), None) if here else None,
        measured=_if_right(partial(_rates, cpu, nodes), None) if here else None,
        gpus_unread=seen.unread,
    )


def _asked_name() -> str | None:
    """The CPU's name from py-cpuinfo, which takes a second: only where `/proc` does not have it."""
    try:
        import cpuinfo

        return str(cpuinfo.get_cpu_info().get("brand_raw") or "") or None
    except Exception:  # whatever its many ways of asking raise; a name is not worth failing
        return None


def _if_right(read: Callable[[], T], otherwise: T) -> T:
    """What is read, unless KT_HOME, KT_THREADS or KT_NUMA is wrong: an error of the command that needs it, not of
    looking at the machine."""
    try:
        return read()
    except UsageError:
        return otherwise


def _rates(cpu: Cpu, nodes: Sequence[Node]) -> Measured | None:
    """The measured rates of the teams that a command would start now."""
    teams = teams_here(nodes, cpu, None, asked_numa(None))
    return measured.load(cpu, sum(team.threads for team in teams))


def amx_facts(machine: Machine, used_row: str) -> Facts:
    """Returns the facts on the running system that decide whether AMX tiles are used: CPU features, support by the
    operating system, permission, and the row of kernels in use.

    Args:
        used_row: the row of kernels in use; empty: none.
    Raises:
        NativeError: the native library is missing.
    """
    from ktcli import native

    info = native.amx_info()
    rows = {row.name: row.missing for row in native.isa_rows()}
    return Facts(
        **asdict(info),
        lacking=rows.get(ROW),
        used_row=used_row,
        forced_isa=config.forced_isa(),
        model=machine.cpu.model,
        signature=read_signature(SYSTEM_ROOT),
        hypervisor="hypervisor" in machine.cpu.flags,
        release=machine.system.removeprefix("Linux").strip(),
    )


def usable_isa() -> tuple[str, ...]:
    """Returns the names of the rows of kernels (one per instruction set) that this CPU can run, best first; empty if
    the native library is missing.
    """
    from ktcli import native

    try:
        return tuple(row.name for row in native.isa_rows() if row.usable)
    except NativeError:
        return ()
