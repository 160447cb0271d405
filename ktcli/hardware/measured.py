"""Measured rates of this machine, kept with their date in `measured.json` of the library folder.

A measurement belongs to one CPU model, thread count and kernel row; another combination does not
use it. What is measured apart (see `crossover`) lies in the same entry. That of a GPU belongs to its
name. A damaged file counts as no measurement: it can always be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.errors import KtError
from ktcli.hardware.machine import Cpu, Gpu, Machine, Measured
from ktcli.hardware.numa import asked_numa
from ktcli.hardware.team import bound_nodes, make_team

# Larger than any cache of a CPU socket, so that reading it is reading memory.
BUFFER_BYTES = 1 << 30
SMALLEST_BUFFER_BYTES = 512 << 20
MAX_RATE = 1e18  # per second; more is no measurement
MAX_BYTES = 1 << 20  # of measured.json
LOCK_WAIT_S = 5.0  # whoever holds it writes one small file
_GPU_RATES = ("read_bps", "bf16_ops", "copy_bps")


def load(cpu: Cpu, threads: int, isa: str | None = None) -> Measured | None:
    """The rates of this CPU with these threads and this row; None if nobody measured them.

    Args:
        isa: None: KT_ISA, else the best.
    Raises:
        UsageError: KT_HOME names something that is not a folder.
    """
    isa = isa or config.forced_isa() or (cpu.isa[0] if cpu.isa else "")
    found = entry(cpu, threads, isa)
    try:
        rates = Measured(
            isa=isa,
            threads=threads,
            read_bps=float(found["read_bps"]),
            int8_ops=float(found["int8_ops"]),
            bf16_ops=float(found["bf16_ops"]),
            date=str(found["date"]),
            nodes=int(found.get("nodes", 1)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    values = (rates.read_bps, rates.int8_ops, rates.bf16_ops, rates.nodes)
    return rates if all(1 <= value < MAX_RATE for value in values) else None


def measure(machine: Machine, step: Callable[[str], None]) -> Measured:
    """Measure with all threads for about three seconds, in the teams that a model would get; nothing is
    stored.

    Args:
        step: told what is measured now.
    Raises:
        NativeError: the native library is missing or refuses KT_ISA.
    """
    from ktcli.native import Ceiling

    pool = make_team(machine.cpu, nodes=machine.nodes, numa=asked_numa(None))
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
    """Keep `rates` for the next command.

    Raises:
        KtError: the library folder cannot be written.
    """
    keep(cpu, rates.threads, rates.isa, asdict(rates))


def entry(cpu: Cpu, threads: int, isa: str) -> dict[str, Any]:
    """All that is kept of this CPU with these threads and this row, unchecked; empty: nothing."""
    return _read().get(_key(cpu.model, threads, isa), {})


def keep(cpu: Cpu, threads: int, isa: str, values: Mapping[str, object]) -> None:
    """Write `values` into that entry, beside what it holds under other names.

    Raises:
        KtError: the library folder cannot be written.
    """
    _keep(_key(cpu.model, threads, isa), values)


def with_rates(gpu: Gpu) -> Gpu:
    """The GPU with what was measured of GPUs of its name; as it is if nobody measured one."""
    found = _read().get(_gpu_key(gpu), {})
    try:
        read, ops, copy = (float(found[name]) for name in _GPU_RATES)
    except (KeyError, TypeError, ValueError, OverflowError):
        return gpu
    if not all(1 <= rate < MAX_RATE for rate in (read, ops, copy)):
        return gpu
    return replace(gpu, read_bps=read, bf16_ops=ops, copy_bps=copy)


def save_gpu(gpu: Gpu) -> None:
    """Keep the rates of a GPU for the next command.

    Raises:
        KtError: the library folder cannot be written.
    """
    _keep(_gpu_key(gpu), {name: getattr(gpu, name) for name in _GPU_RATES})


def _gpu_key(gpu: Gpu) -> str:
    return f"GPU | {gpu.name}"


def _keep(key: str, values: Mapping[str, object]) -> None:
    path = _path()
    with smallfiles.lock(
        path.with_suffix(".lock"), "keeping what was measured", wait_s=LOCK_WAIT_S
    ):
        known = _read()
        known[key] = {**known.get(key, {}), **values}
        text = json.dumps(known, indent=2, sort_keys=True) + "\n"
        try:
            smallfiles.write(path, text)
        except OSError as error:
            raise KtError(f"cannot write {path}: {error.strerror}") from error


def _key(model: str | None, threads: int, isa: str) -> str:
    return f"{model or 'unknown'} | {threads} threads | {isa}"


def _path() -> Path:
    return config.home() / "measured.json"


def _read() -> dict[str, dict[str, Any]]:
    """All entries; what cannot be one is dropped, and gone after the next write."""
    try:
        known = smallfiles.json_object(smallfiles.read_bounded(_path(), MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return {
        key: value for key, value in known.items() if isinstance(value, dict) and _is_flat(value)
    }


def _is_flat(value: object, levels: int = 3) -> bool:
    """Whether it nests no deeper than what is written here."""
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)
