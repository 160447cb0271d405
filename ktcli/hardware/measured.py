"""Measured rates of this machine, stored with their date in `measured.json` in the library folder.

A measurement belongs to one CPU model, thread count and kernel row; another combination does not
use it. Other measurements (see `measure.tiles`) lie in the same entry. A GPU's entry belongs to its name. A damaged
file counts as no measurement: it can always be made again. Here it is only read; `measure.rates` measures and writes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ktcli import config, smallfiles
from ktcli.hardware.machine import Cpu, Gpu, Measured

MAX_RATE = 1e18  # per second; more is no measurement
MAX_BYTES = 1 << 20  # the largest measured.json that is read
GPU_RATES = ("read_bps", "bf16_ops", "copy_bps")


def load(cpu: Cpu, threads: int, isa: str | None = None) -> Measured | None:
    """Returns the stored rates (memory read, int8 and bf16 operations per second) that were measured on this CPU model
    with `threads` threads of one row of kernels; None: there are none, or they are invalid.

    Args:
        isa: the row of kernels; None: KT_ISA, else the best.
    Raises:
        UsageError: the library folder cannot be used, such as a KT_HOME that is a file.
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


def entry(cpu: Cpu, threads: int, isa: str) -> dict[str, Any]:
    """Returns the entry of this CPU model, thread count and row of kernels `isa` in `measured.json`: its values
    (`read_bps`, `int8_ops`, `bf16_ops`, `date` …) by name, unchecked; empty if there is none.
    """
    return entries().get(key(cpu.model, threads, isa), {})


def with_rates(gpu: Gpu) -> Gpu:
    """Returns `gpu` with the memory, copy and bf16 rates that `measured.json` holds for GPUs of its name; unchanged if
    it holds none or invalid ones. Raises UsageError if the library folder cannot be used.
    """
    found = entries().get(gpu_key(gpu), {})
    try:
        read, ops, copy = (float(found[name]) for name in GPU_RATES)
    except (KeyError, TypeError, ValueError, OverflowError):
        return gpu
    if not all(1 <= rate < MAX_RATE for rate in (read, ops, copy)):
        return gpu
    return replace(gpu, read_bps=read, bf16_ops=ops, copy_bps=copy)


def gpu_key(gpu: Gpu) -> str:
    """Returns the key of a GPU's entry in `measured.json`: "GPU | " and the name of the GPU."""
    return f"GPU | {gpu.name}"


def key(model: str | None, threads: int, isa: str) -> str:
    """Returns the key of a CPU's entry in `measured.json`: "MODEL | N threads | ROW", where ROW is the row of kernels
    `isa`.
    """
    return f"{model or 'unknown'} | {threads} threads | {isa}"


def path() -> Path:
    """Returns the path of `measured.json` in the library folder, the file that holds all measurements."""
    return config.home() / "measured.json"


def entries() -> dict[str, dict[str, Any]]:
    """Returns all entries of `measured.json` by key (see `key` and `gpu_key`), each a JSON object of measurements.
    Invalid entries are left out; empty if the file is missing or damaged. Raises UsageError if the library folder
    cannot be used.
    """
    try:
        known = smallfiles.json_object(smallfiles.read_bounded(path(), MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return {
        key: value for key, value in known.items() if isinstance(value, dict) and _is_flat(value)
    }


def _is_flat(value: object, levels: int = 3) -> bool:
    """Returns whether a value nests no deeper than the entries that are written here."""
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)
