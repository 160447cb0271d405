"""Measures this machine, so that later plans use the measured rates, and failed GPU methods are tried again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ktcli.assembly import host
from ktcli.assembly.listener import SILENT, Listener
from ktcli.errors import DeviceError
from ktcli.hardware.amx import ROW
from ktcli.hardware.machine import Gpu, Machine
from ktcli.measure import rates, tiles
from ktcli.store import experience


def measure_machine(machine: Machine, threads: int, listener: Listener = SILENT) -> Machine:
    """Measures the rates of the CPU and the GPUs, stores them for later commands, and forgets which faster GPU methods
    failed; returns `machine` with these rates.

    Args:
        threads: the threads of the teams that a command would start now.
    Raises:
        NativeError: the native library refuses KT_ISA.
        KtError: the library folder cannot be written.
    """
    listener.note(
        "Measuring for a few seconds; other programs running now would distort the result."
    )
    experience.forget_failures()
    cpu = machine.cpu
    if tiles.look(cpu, threads).measurable:
        listener.note("  tiles compared with vectors …")
        tiles.save(cpu, threads, ROW, tiles.measure(cpu, threads, ROW))
    found = rates.measure(machine, lambda what: listener.note(f"  {what} …"))
    rates.save(machine.cpu, found)
    return replace(machine, measured=found, gpus=tuple(_measured_gpus(machine.gpus, listener)))


def _measured_gpus(gpus: Sequence[Gpu], listener: Listener) -> Iterator[Gpu]:
    """Measures each GPU that torch can use and keeps its rates; yields all GPUs."""
    from ktcli.engine.device.usable import why_not

    reason = why_not() if gpus else ""
    for each in gpus:
        if reason:
            listener.warn(f"{each.name} is not measured: {reason}")
            yield each
            continue
        from ktcli.measure.device_ceilings import measure_rates

        listener.note(f"  {each.name} …")
        try:
            found = measure_rates(host.torch_device(each.index))
        except DeviceError as error:
            listener.warn(f"{each.name} is not measured: {error}")
            yield each
            continue
        made = replace(
            each, read_bps=found.read_bps, bf16_ops=found.bf16_ops, copy_bps=found.copy_bps
        )
        rates.save_gpu(made)
        yield made
