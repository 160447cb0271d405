"""Small `/proc` and `/sys` trees of machines, written in the kernel's layout below a folder.

A machine is one row of `TREES`; what a reader must find there stands beside it in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

GIB_KB = 1 << 20  # kB in a GiB, the unit of meminfo


@dataclass(frozen=True)
class Tree:
    """One machine.

    Attributes:
        packages: CPU numbers of each core of each socket: packages[socket][core] = siblings.
        nodes: node number → (CPU list, GiB of memory).
        allowed: Cpus_allowed_list of this process.
        mems: Mems_allowed_list of this process; None: the kernel does not say.
        offline: CPUs that are switched off: they have no topology folder.
        files: further files, path → text.
    """

    packages: tuple[tuple[tuple[int, ...], ...], ...]
    nodes: dict[int, tuple[str, int]]
    allowed: str
    mems: str | None = None
    offline: tuple[int, ...] = ()
    flags: str = "avx2 fma avx512f avx512_vnni"
    model: str = "Example CPU"
    memory_gib: int = 64
    files: dict[str, str] = field(default_factory=dict)


def _smt(cores: range, offset: int) -> tuple[tuple[int, ...], ...]:
    """Cores whose second hyperthread has the number `offset` higher."""
    return tuple((core, core + offset) for core in cores)


def _plain(cores: range) -> tuple[tuple[int, ...], ...]:
    return tuple((core,) for core in cores)


_SPR = (
    "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"
)

TREES: dict[str, Tree] = {
    "desktop": Tree(
        (_smt(range(8), 8),), {0: ("0-15", 64)}, "0-15", flags="avx2 fma f16c avx_vnni"
    ),
    "two-sockets": Tree(
        (_smt(range(32), 64), _smt(range(32, 64), 64)),
        {0: ("0-31,64-95", 256), 1: ("32-63,96-127", 256)},
        "0-127",
        flags=_SPR,
        memory_gib=512,
    ),
    "snc-4": Tree(
        (_smt(range(24), 48), _smt(range(24, 48), 48)),
        {n: (f"{12 * n}-{12 * n + 11},{48 + 12 * n}-{48 + 12 * n + 11}", 64) for n in range(4)},
        "0-95",
        flags=_SPR,
        memory_gib=256,
    ),
    "snc-8": Tree(
        (_plain(range(32)), _plain(range(32, 64))),
        {n: (f"{8 * n}-{8 * n + 7}", 32) for n in range(8)},
        "0-63",
        memory_gib=256,
    ),
    "epyc-nps4": Tree(
        (_smt(range(64), 64),),
        {n: (f"{16 * n}-{16 * n + 15},{64 + 16 * n}-{64 + 16 * n + 15}", 96) for n in range(4)},
        "0-127",
        memory_gib=384,
    ),
    "cxl-memory": Tree(
        (_smt(range(16), 16),), {0: ("0-31", 128), 2: ("", 256)}, "0-31", memory_gib=384
    ),
    "odd-node-ids": Tree(
        (_plain(range(8)), _plain(range(8, 16))),
        {2: ("0-7", 64), 3: ("8-15", 64)},
        "0-15",
        memory_gib=128,
    ),
    "offline-cores": Tree(
        (_smt(range(8), 8),), {0: ("0-5,8-13", 64)}, "0-5,8-13", offline=(6, 7, 14, 15)
    ),
    # Hyperthreads switched off at run time: each core's second CPU is offline.
    "smt-off": Tree((_smt(range(4), 4),), {0: ("0-3", 64)}, "0-3", offline=(4, 5, 6, 7)),
    # A container with a cpuset that holds both threads of two cores and one of a third.
    "container": Tree(
        (_smt(range(16), 16),),
        {0: ("0-31", 128)},
        "2-4,18-19",
        memory_gib=128,
        files={
            "proc/self/cgroup": "0::/docker/abc",
            "sys/fs/cgroup/docker/abc/cpu.max": "250000 100000",
            "sys/fs/cgroup/docker/abc/memory.max": str(16 << 30),
            "sys/fs/cgroup/docker/abc/memory.current": str(6 << 30),
            "sys/fs/cgroup/docker/abc/memory.stat": f"anon 1\nactive_file {1 << 30}\ninactive_file {3 << 30}",
            "sys/fs/cgroup/docker/memory.max": "max",
        },
    ),
    # Cgroup version 1, seen from inside a container: the path does not exist below the mount.
    "container-v1": Tree(
        (_plain(range(8)),),
        {0: ("0-7", 64)},
        "0-7",
        files={
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 << 30),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 << 30),
        },
    ),
    # Memory that the kernel throttles before it refuses, of the group above ours lower than of ours.
    "throttled": Tree(
        (_plain(range(4)),),
        {0: ("0-3", 64)},
        "0-3",
        files={
            "proc/self/cgroup": "0::/user.slice/app",
            "sys/fs/cgroup/user.slice/app/memory.max": str(32 << 30),
            "sys/fs/cgroup/user.slice/app/memory.high": str(24 << 30),
            "sys/fs/cgroup/user.slice/app/memory.current": str(1 << 30),
            "sys/fs/cgroup/user.slice/memory.max": "max",
            "sys/fs/cgroup/user.slice/memory.high": str(12 << 30),
            "sys/fs/cgroup/user.slice/memory.current": str(2 << 30),
        },
    ),
    # Eight fast cores with hyperthreads, numbered around two groups of eight slow ones.
    "hybrid": Tree(
        (
            tuple((i, i + 1) for i in range(0, 8, 2))
            + _plain(range(8, 16))
            + tuple((i, i + 1) for i in range(16, 24, 2))
            + _plain(range(24, 32)),
        ),
        {0: ("0-31", 64)},
        "0-31",
        files={
            "sys/devices/cpu_core/cpus": "0-7,16-23",
            "sys/devices/cpu_atom/cpus": "8-15,24-27",
            "sys/devices/cpu_lowpower/cpus": "28-31",
        },
    ),
    # A container on two sockets with some cores of both, but memory of the second only.
    "container-mems": Tree(
        (_smt(range(16), 32), _smt(range(16, 32), 32)),
        {0: ("0-15,32-47", 128), 1: ("16-31,48-63", 128)},
        "8-23",
        mems="1",
        memory_gib=256,
    ),
    # The second socket's slots are empty.
    "no-memory-node": Tree(
        (_plain(range(8)), _plain(range(8, 16))),
        {0: ("0-7", 64), 1: ("8-15", 0), 2: ("", 32)},
        "0-15",
        mems="0-2",
        memory_gib=96,
    ),
    # The cpuset leaves all of one node, a part of the next, nothing of the third; the fourth is off.
    "unequal-nodes": Tree(
        (_plain(range(32)),),
        {0: ("0-7", 32), 1: ("8-15", 32), 2: ("16-23", 32), 3: ("", 32)},
        "0-10",
        mems="0-3",
        offline=tuple(range(24, 32)),
        memory_gib=128,
    ),
    # Nothing but processors: no nodes, no caches, no topology.
    "bare": Tree((_plain(range(2)),), {}, "0-1", memory_gib=4),
}


def build(tree: Tree, root: Path) -> Path:
    """Write the files of `tree` below `root`."""
    cpu = "sys/devices/system/cpu"
    online = sorted(
        c for package in tree.packages for core in package for c in core if c not in tree.offline
    )
    files = {
        f"{cpu}/online": ",".join(map(str, online)),
        "proc/self/status": f"Name:\tkt\nCpus_allowed:\tff\nCpus_allowed_list:\t{tree.allowed}\n"
        + ("" if tree.mems is None else f"Mems_allowed:\tff\nMems_allowed_list:\t{tree.mems}\n"),
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: {tree.model}\nflags\t\t: fpu {tree.flags}\n",
        "proc/meminfo": f"MemTotal: {tree.memory_gib * GIB_KB} kB\nMemFree: 1024 kB\n"
        f"MemAvailable: {tree.memory_gib * GIB_KB // 2} kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "proc/sys/kernel/osrelease": "6.8.0",
    }
    for package, cores in enumerate(tree.packages):
        for core in cores:
            for number in set(core) & set(online):
                files |= _topology(f"{cpu}/cpu{number}", package, core, tree.offline)
    if not tree.nodes:
        files = {
            name: text
            for name, text in files.items()
            if "/topology/" not in name and "/cache/" not in name
        }
    for number, (cpus, gib) in tree.nodes.items():
        node = f"sys/devices/system/node/node{number}"
        meminfo = (
            ("MemTotal", gib * GIB_KB),
            ("MemFree", gib * GIB_KB // 4),
            ("Inactive(file)", 1024),
        )
        files[f"{node}/cpulist"] = cpus
        files[f"{node}/meminfo"] = "\n".join(f"Node {number} {key}: {kb} kB" for key, kb in meminfo)
    for name, text in (files | tree.files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def _topology(
    folder: str, package: int, core: tuple[int, ...], offline: tuple[int, ...]
) -> dict[str, str]:
    siblings = ",".join(str(c) for c in core if c not in offline)
    return {
        f"{folder}/topology/core_cpus_list": siblings,
        f"{folder}/topology/physical_package_id": str(package),
        f"{folder}/cache/index0/level": "1",
        f"{folder}/cache/index0/type": "Data",
        f"{folder}/cache/index0/size": "48K",
        f"{folder}/cache/index0/shared_cpu_list": siblings,
        f"{folder}/cache/index1/level": "1",
        f"{folder}/cache/index1/type": "Instruction",
        f"{folder}/cache/index1/size": "32K",
        f"{folder}/cache/index1/shared_cpu_list": siblings,
        f"{folder}/cache/index3/level": "3",
        f"{folder}/cache/index3/type": "Unified",
        f"{folder}/cache/index3/size": "32M",
        f"{folder}/cache/index3/shared_cpu_list": f"package {package}",
    }
