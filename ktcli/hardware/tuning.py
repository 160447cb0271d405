"""The system settings that affect the speed of kt here, from `/proc` and `/sys` below any root.

Facts only; what follows from them is said in `diagnosis`. What the system does not tell is None.
"""

from __future__ import annotations

import re
from pathlib import Path

from ktcli.hardware.cpu import allowed_cpus, online_cpus
from ktcli.hardware.text import kib, read, read_int, table
from ktcli.records import dataclass

# Drivers whose "powersave" raises the clock under load, as "performance" does.
_DYNAMIC = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of a running system.

    Attributes:
        cpus: the CPUs, hyperthreads too, that this process may use.
        governor: how the clock of the first of them is chosen, where that keeps it low; empty: it does not.
        clock_gain: its highest clock as a multiple of the lowest; None: unknown.
        numa_balancing: whether the kernel moves memory between nodes by itself.
        commit_bytes: what may still be promised where the kernel promises no more memory than there is; None: it does.
        channels: the memory channels with a module in them.
    """

    cpus: tuple[int, ...] = ()
    governor: str = ""
    clock_gain: float | None = None
    numa_balancing: bool | None = None
    commit_bytes: int | None = None
    channels: int | None = None


def read_tuning(root: Path) -> Tuning:
    """Returns the system settings under `root` on which kt's speed depends: usable CPUs, clock governor and range, NUMA
    balancing, memory overcommit, and memory channels in use.
    """
    cpus = allowed_cpus(root) or online_cpus(root)
    clock = root / f"sys/devices/system/cpu/cpu{cpus[0] if cpus else 0}/cpufreq"
    governor = read(clock / "scaling_governor") or ""
    is_slow = governor == "powersave" and read(clock / "scaling_driver") not in _DYNAMIC
    least, most = read_int(clock / "cpuinfo_min_freq"), read_int(clock / "cpuinfo_max_freq")
    balancing = read_int(root / "proc/sys/kernel/numa_balancing")
    return Tuning(
        cpus=cpus,
        governor=governor if is_slow else "",
        clock_gain=most / least if least and most and most > least > 0 else None,
        numa_balancing=None if balancing is None else balancing > 0,
        commit_bytes=_commit_bytes(root),
        channels=_channels(root),
    )


def _commit_bytes(root: Path) -> int | None:
    if read_int(root / "proc/sys/vm/overcommit_memory") != 2:
        return None
    info = table(read(root / "proc/meminfo"))
    limit, used = kib(info.get("CommitLimit")), kib(info.get("Committed_AS"))
    return None if limit is None or used is None else max(0, limit - used)


def _channels(root: Path) -> int | None:
    """The channels that hold a module, where the memory controllers' drivers (EDAC) say it."""
    found: set[tuple[str, str]] = set()
    for module in sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*/dimm[0-9]*")):
        channel = re.search(r"channel (\d+)", read(module / "dimm_location") or "")
        if channel and (read_int(module / "size") or 0) > 0:
            found.add((module.parent.name, channel[1]))
    return len(found) or None
