"""Describes this machine for the planner, and tells whether its GPUs can be used."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import DeviceError
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.gpu import AUTO, CPU, hidden, hidden_by_mistake
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import OFF, Numa, asked_numa
from ktcli.hardware.probe import SYSTEM_ROOT, probe
from ktcli.hardware.team import forced_size, make_team, on_nodes, teams_here
from ktcli.measure.tiles import start_team
from ktcli.native import Pool, isa_rows
from ktcli.planner.host import Host, host_of

if TYPE_CHECKING:
    import torch


# Whether a GPU failed in this process, which is all that torch needs to be of no more use on any of them.
_left = threading.Event()
_full_s = [-math.inf]  # when the memory of a GPU was full last, `time.monotonic`
_AGAIN_S = 3600.0


def leave_gpus() -> None:
    """Makes this process use the CPU from now on unless a GPU is asked for; a GPU that has failed fails again until kt
    is restarted.
    """
    _left.set()


def is_full_again() -> bool:
    """Returns whether a GPU's memory was already full within the last hour, and records that it is full now; to be
    called each time that it is full.
    """
    before, _full_s[0] = _full_s[0], time.monotonic()
    return _full_s[0] - before < _AGAIN_S


def where_now(asked: str) -> str:
    """Returns the device to use, `asked` as it is; but "cpu" instead of "auto" once `leave_gpus` was called."""
    return CPU if asked == AUTO and _left.is_set() else asked


def machine_here(*, gpus: bool = True) -> Machine:
    """Returns the hardware facts of this machine as they are now: CPU, memory, NUMA nodes, GPUs and disk.

    Args:
        gpus: whether to look for GPUs too, whose driver may have to wake up.
    """
    return probe(gpus=gpus)


def host_here(
    machine: Machine, threads: int | None, numa: Numa | None, *, torch: bool, isa: str | None = None
) -> Host:
    """Returns the facts about this machine that the planner uses, as the options and the environment's settings
    restrict them.

    Args:
        threads: the number of threads; None: as KT_THREADS or the setting `threads` says.
        numa: the teams and their memory; None: as KT_NUMA or the setting `numa` says.
        torch: whether PyTorch is installed.
        isa: the row of kernels; None: as KT_ISA says.
    Raises:
        UsageError: more threads than cores, or `numa` names nodes that cannot be used.
    """
    numa = asked_numa(None) if numa is None else numa
    forced = forced_size(on_nodes(machine.nodes, machine.cpu, numa), threads)
    row = isa or config.forced_isa()
    return host_of(machine, threads=forced, isa=row, numa=numa, torch=torch)


def row_here() -> str:
    """Returns the name of the row of CPU kernels (an instruction set) that engines use on this machine: KT_ISA, else
    the best.
    """
    return config.forced_isa() or next(row.name for row in isa_rows() if row.usable)


def team_here(threads: int | None = None, numa: Numa | None = None, isa: str | None = None) -> Pool:
    """Returns a native thread pool, started, with the teams of threads that a command uses where no plan says which.

    Raises:
        UsageError: more threads than cores, or nodes that cannot be used.
        NativeError: the native library is missing or refuses the row.
    """
    machine = machine_here(gpus=False)
    asked = asked_numa(None) if numa is None else numa
    return start_team(machine.cpu, teams_here(machine.nodes, machine.cpu, threads, asked), isa)


def team_to_convert(threads: int | None = None) -> Pool:
    """Returns a native thread pool, started, of one team of `team_size` threads, its memory on any NUMA node:
    converted data passes through it once.

    Raises:
        UsageError, NativeError: as `team_here`.
    """
    cpu = read_cpu(SYSTEM_ROOT, ())
    return make_team(teams_here((), cpu, threads, OFF))


def usable(machine: Machine, asked: str, listener: Listener = SILENT) -> bool:
    """Returns whether torch can use a GPU of this machine; the listener is told why one that is there is not used.

    Raises:
        DeviceError: a GPU was asked for and cannot be used.
    """
    if not machine.gpus:
        if asked == AUTO:
            if hidden_by_mistake():
                listener.warn(f"no GPU is used: none responds{hidden()}")
            return False
        said = f"; nvidia-smi says: {machine.gpus_unread[0]}" if machine.gpus_unread else ""
        raise DeviceError(
            f"--device {asked[:40]} asks for a GPU, but no NVIDIA GPU responds here{hidden()}{said}",
            hint="kt doctor shows what was found; --device cpu runs without one",
        )
    # CUDA's own order puts fast GPUs first; the driver's tool, whose numbers are shown, goes by slot.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    from ktcli.engine.device.usable import why_not

    reason = why_not()
    if reason and asked != AUTO:
        raise DeviceError(f"{machine.gpus[0].name} cannot be used: {reason}")
    if reason:
        listener.warn(f"{machine.gpus[0].name} is not used: {reason}")
    return not reason


def torch_device(index: int) -> torch.device:
    """Returns the torch device "cuda:index" of a GPU of this machine."""
    import torch

    return torch.device("cuda", index)
