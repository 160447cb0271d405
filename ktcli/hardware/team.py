"""The team of threads that runs the kernels: how many, on which cores.

One thread per physical core of this process's cpuset, less where a container allows less time. Whatever
starts threads for the kernels asks here, so that what is planned, measured and run is one team.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktcli import config
from ktcli.hardware.machine import Cpu

if TYPE_CHECKING:
    from ktcli.native import Pool


def team_size(cpu: Cpu, asked: int | None = None) -> int:
    """Threads: as many as asked for, else as KT_THREADS says, else as are worth starting.

    Raises:
        UsageError: KT_THREADS makes no sense.
    """
    return asked or config.forced_threads() or cpu.threads


def pinned_to(cpu: Cpu, threads: int) -> tuple[int, ...] | None:
    """The CPUs that a team is pinned to, one per thread; None: more threads than cores, not pinned."""
    return cpu.cores[:threads] if threads <= len(cpu.cores) else None


def make_team(cpu: Cpu, threads: int | None = None, *, isa: str | None = None) -> Pool:
    """Start a team.

    Args:
        threads: asked for; None: see `team_size`.
        isa: row of kernels; None: KT_ISA, else the best.
    Raises:
        UsageError: KT_THREADS makes no sense.
        NativeError: the native library is missing or refuses the row.
    """
    from ktcli.hardware import crossover
    from ktcli.native import Pool

    size = team_size(cpu, threads)
    tile_min = crossover.tile_min(cpu, size, isa)
    return Pool(size, isa=isa, cpus=pinned_to(cpu, size), tile_min=tile_min)
