"""Measures the rates at which this machine reads and computes, and stores them for later commands.

They are kept in `measured.json` of the library folder, which `hardware.measured` reads. A process that writes it
holds its lock meanwhile, so that two that measure at the same time both keep their results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import date

from ktcli import smallfiles
from ktcli.errors import KtError
from ktcli.hardware import measured
from ktcli.hardware.machine import Cpu, Gpu, Machine, Measured
from ktcli.hardware.numa import asked_numa
from ktcli.hardware.team import bound_nodes, make_team, teams_here

# Larger than any cache of a CPU socket, so that reading it is reading memory.
BUFFER_BYTES = 1 << 30
SMALLEST_BUFFER_BYTES = 512 << 20
LOCK_WAIT_S = 5.0  # its holder writes one small file


def measure(machine: Machine, step: Callable[[str], None]) -> Measured:
    """Returns the rates of the CPU, measured for about three seconds with all the threads that a model would get: bytes
    per second of reading, and int8 and bf16 operations per second. Nothing is stored.

    Args:
        step: called with the name of what is measured next.
    Raises:
        NativeError: the native library is missing or refuses KT_ISA.
    """
    from ktcli.native import Ceiling

    pool = make_team(teams_here(machine.nodes, machine.cpu, None, asked_numa(None)))
    size = max(SMALLEST_BUFFER_BYTES, min(BUFFER_BYTES, machine.memory.free_bytes // 4))
    step("memory bandwidth")
    arenas = [pool.arena(size // len(pool.node_threads), i) for i in range(len(pool.node_threads))]
    for arena in arenas:  # pages that were never written are all one zero page, which caches hold
        arena.bytes.fill(1)
    read_bps = max(
        pool.ceiling(Ceiling.READ, 0.5, [arena.bytes for arena in arenas]) for _ in range(3)
    )
    del arenas, arena
    step("int8 arithmetic")
    int8_ops = pool.ceiling(Ceiling.INT8, 0.5)
    step("bf16 arithmetic")
    bf16_ops = pool.ceiling(Ceiling.BF16, 0.5)
    today = date.today().isoformat()
    nodes = bound_nodes(pool.teams)
    return Measured(pool.isa, pool.threads, read_bps, int8_ops, bf16_ops, today, nodes)


def save(cpu: Cpu, rates: Measured) -> None:
    """Writes measured rates of the CPU to `measured.json` in kt's library folder, for later commands.

    Raises:
        KtError: the library folder cannot be written.
    """
    keep(cpu, rates.threads, rates.isa, asdict(rates))


def save_gpu(gpu: Gpu) -> None:
    """Writes the measured rates of a GPU to `measured.json` in kt's library folder, for later commands.

    Raises:
        KtError: the library folder cannot be written.
    """
    _keep(measured.gpu_key(gpu), {name: getattr(gpu, name) for name in measured.GPU_RATES})


def keep(cpu: Cpu, threads: int, isa: str, values: Mapping[str, object]) -> None:
    """Writes `values` to the entry that `measured.json` in kt's library folder has for this CPU with `threads` threads;
    other values of the entry stay.

    Args:
        isa: the name of the instruction set of the kernels, a part of the entry's key.
    Raises:
        KtError: the library folder cannot be written.
    """
    _keep(measured.key(cpu.model, threads, isa), values)


def _keep(key: str, values: Mapping[str, object]) -> None:
    path = measured.path()
    lock = path.with_suffix(".lock")
    with smallfiles.lock(lock, "saving measurements", wait_s=LOCK_WAIT_S):
        known = measured.entries()
        known[key] = {**known.get(key, {}), **values}
        try:
            smallfiles.write(path, json.dumps(known, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise KtError(f"cannot write {path}: {error.strerror}") from error
