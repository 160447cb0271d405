"""The limits that a container sets for this process: CPU time and memory, cgroup version 1 or 2.

A limit may stand on any level above us, so every level is read and the tightest counts: of memory also the one above
which the kernel only slows a process down (`memory.high`), as it then takes back the weights that are read. Inside a
container the path that the kernel reports may not exist below the mount; the mount's root is then
ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktcli.hardware.text import read, read_int, whole

# Version 1 writes "no limit" as the largest page-aligned number; nothing real comes near this.
_UNLIMITED = 1 << 60


def cpu_quota(root: Path) -> float | None:
    """Returns the CPU time that the cgroups of this process allow it, as a number of CPUs (1.5: one and a half); None:
    no limit. Files are read below `root`, "/" on a running system.
    """
    quotas: list[float] = []
    for folder in _levels(root, "cpu"):
        words = [whole(word) for word in (read(folder / "cpu.max") or "").split()]
        if len(words) == 2 and words[0] is not None and words[1]:
            quotas.append(words[0] / words[1])
        quota = read_int(folder / "cpu.cfs_quota_us")
        period = read_int(folder / "cpu.cfs_period_us")
        if quota and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_limit(root: Path) -> tuple[int, int] | None:
    """Returns the memory limit of this process's cgroups and how much of it is used (without page cache), both in
    bytes; of several nested limits, those with the least room. None: no limit. Files are read below `root`.
    """
    found: list[tuple[int, int]] = []
    for folder in _levels(root, "memory"):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (limit := read_int(folder / name)) and limit < _UNLIMITED
        ]
        used = read_int(folder / "memory.current") or read_int(folder / "memory.usage_in_bytes")
        if limits:
            found.append((min(limits), max(0, (used or 0) - _file_cache(folder))))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _file_cache(folder: Path) -> int:
    """The bytes of page cache, which the kernel gives up when asked for memory."""
    total = 0
    for line in (read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "active_file"):
            total += whole(value) or 0
    return total


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """The folders that may limit us, innermost first."""
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            mount = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (names, controller)]
            mount = next((m for m in mounts if m.is_dir()), mounts[0])
        else:
            continue
        inside = [part for part in path.split("/") if part not in ("", ".", "..")]
        while inside:
            yield mount.joinpath(*inside)
            inside.pop()
        yield mount
