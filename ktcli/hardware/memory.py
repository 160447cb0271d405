"""Main memory and its NUMA nodes, from `/proc/meminfo` and `/sys/devices/system/node`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ktcli.hardware import cgroup
from ktcli.hardware.machine import Memory, Node
from ktcli.hardware.text import kib, listed, read, table, whole


def read_memory(root: Path) -> Memory:
    """Returns the sizes of main memory: total, available, swap and huge pages of the machine under `root`, and the
    limit and use of this process's container.
    """
    info = table(read(root / "proc/meminfo"))
    total = kib(info.get("MemTotal")) or 0
    available = kib(info.get("MemAvailable"))
    if available is None:  # kernels before 3.14
        available = (kib(info.get("MemFree")) or 0) + (kib(info.get("Cached")) or 0)
    limit = cgroup.memory_limit(root)
    if limit is not None and limit[0] >= total:
        limit = None
    modes = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Memory(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit[0] if limit else None,
        used_bytes=limit[1] if limit else None,
        swap_bytes=kib(info.get("SwapTotal")) or 0,
        huge_pages=modes.group(1) if modes else None,
        huge_free_bytes=(whole(info.get("HugePages_Free", "")) or 0)
        * (kib(info.get("Hugepagesize")) or 0),
    )


def resident_bytes(root: Path, process: int | str = "self") -> int | None:
    """Returns the resident memory of a process in bytes, by its id or "self"; None if its figures cannot be read under
    `root`, for example because there is no such process.
    """
    pages = (read(root / f"proc/{process}/statm") or "").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else None


def allowed_nodes(root: Path) -> tuple[int, ...] | None:
    """Returns the numbers of the NUMA nodes whose memory this process may use, which a cpuset may limit; None: the
    system does not report them.
    """
    return listed(table(read(root / "proc/self/status")).get("Mems_allowed_list")) or None


def read_nodes(root: Path, cores: tuple[int, ...], memory: Memory) -> tuple[Node, ...]:
    """Returns the NUMA nodes under `root` in ascending order, each with its usable cores and its memory in bytes; a
    single node with all `cores` and all `memory` where the system does not list several.

    Args:
        cores: the physical cores this process may use.
    """
    base = root / "sys/devices/system/node"
    usable, allowed, nodes = set(cores), allowed_nodes(root), []
    numbers = (whole(path.name[4:]) for path in base.glob("node[0-9]*"))
    for number in sorted(number for number in numbers if number is not None):
        folder = base / f"node{number}"
        prefix = f"Node {number} "
        lines = (read(folder / "meminfo") or "").splitlines()
        info = table("\n".join(line.strip().removeprefix(prefix) for line in lines))
        easy = ("MemFree", "Active(file)", "Inactive(file)")
        nodes.append(
            Node(
                id=number,
                cores=tuple(c for c in listed(read(folder / "cpulist")) if c in usable),
                size_bytes=kib(info.get("MemTotal")) or 0,
                free_bytes=sum(kib(info.get(key)) or 0 for key in easy),
                allowed=allowed is None or number in allowed,
            )
        )
    nodes = [node for node in nodes if node.cores or node.size_bytes]
    if len(nodes) > 1:
        return tuple(nodes)
    # One node is the machine; memory added while it runs is missing from the node's own file.
    number = nodes[0].id if nodes else 0
    return (Node(number, cores, memory.total_bytes, memory.available_bytes),)
