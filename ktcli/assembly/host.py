"""The machine this runs on, as the planner needs it, and whether its GPUs can be used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import DeviceError
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import Numa
from ktcli.hardware.probe import probe
from ktcli.hardware.team import forced_size, on_nodes
from ktcli.planner.host import Host, host_of

if TYPE_CHECKING:
    import torch


def machine_here() -> Machine:
    """The facts of this machine as they are now."""
    return probe()


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


def usable(machine: Machine, asked: str, listener: Listener = SILENT) -> bool:
    """Whether there is a GPU that torch can use; the listener is told why not, where one is there.

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
        listener.warn(f"{machine.gpus[0].name} is not used: {reason}")
    return not reason


def torch_device(index: int) -> torch.device:
    """What torch calls a GPU of this machine."""
    import torch

    return torch.device("cuda", index)
