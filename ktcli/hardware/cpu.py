"""The processor: name, features, physical cores, and which of them this process may use.

Facts come from `/proc` and `/sys` below `root`; which kernel rows run comes from the native
library, which asks the CPU itself.
"""

from __future__ import annotations

from pathlib import Path

from ktcli.hardware import cgroup
from ktcli.hardware.machine import Cache, Cpu
from ktcli.hardware.text import listed, read, read_int, table, whole

# The features that doctor reports and the planner may ask about; a CPU has more than a hundred others.
INTERESTING = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "hypervisor",
)  # fmt: skip

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_cpu(root: Path, isa: tuple[str, ...]) -> Cpu:
    """Returns the facts of the processor described under `root`: name, features, cores, caches and CPU quota. `isa`
    lists the rows of kernels that the native library can run, best first.
    """
    info = table(read(root / "proc/cpuinfo"))
    cores, packages = _cores(root)
    allowed = allowed_cpus(root) or tuple(sorted(cpu for core in cores for cpu in core))
    flags = set(info.get("flags", "").split())
    usable = physical_cores(root, allowed)
    return Cpu(
        model=info.get("model name") or None,
        isa=isa,
        flags=tuple(flag for flag in INTERESTING if flag in flags),
        sockets=max(1, len(packages)),
        physical_cores=len(cores),
        logical_cpus=sum(map(len, cores)),
        cores=usable,
        quota=cgroup.cpu_quota(root),
        caches=_caches(root),
        efficient=_efficient(root, usable, cores),
    )


def read_signature(root: Path) -> tuple[int, int] | None:
    """Returns the family and model number of the CPU from /proc/cpuinfo below `root`; None: the system does not report
    them.
    """
    info = table(read(root / "proc/cpuinfo"))
    family, model = whole(info.get("cpu family", "")), whole(info.get("model", ""))
    return None if family is None or model is None else (family, model)


def allowed_cpus(root: Path) -> tuple[int, ...]:
    """Returns the numbers of the logical CPUs that this process may run on, by its cpuset and affinity mask, ascending;
    empty if the system does not report them.
    """
    return listed(table(read(root / "proc/self/status")).get("Cpus_allowed_list"))


def online_cpus(root: Path) -> tuple[int, ...]:
    """Returns the numbers of the logical CPUs that are online, ascending."""
    base = root / "sys/devices/system/cpu"
    numbers = (whole(path.name[3:]) for path in base.glob("cpu[0-9]*"))
    return listed(read(base / "online")) or tuple(sorted(n for n in numbers if n is not None))


def physical_cores(root: Path, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Returns one CPU number, the lowest in `cpus`, for each physical core that has CPUs in `cpus`; ascending."""
    wanted, (cores, _) = set(cpus), _cores(root)
    usable = (sorted(core & wanted) for core in cores)
    return tuple(sorted(core[0] for core in usable if core))


def _cores(root: Path) -> tuple[list[set[int]], set[int]]:
    """The online CPUs of each physical core, and the package numbers."""
    online = set(online_cpus(root))
    cores: dict[frozenset[int], set[int]] = {}
    packages: set[int] = set()
    for cpu in sorted(online):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read(topology / "core_cpus_list") or read(topology / "thread_siblings_list")
        core = (set(listed(siblings)) & online) | {cpu}
        cores.setdefault(frozenset(core), core)
        package = read_int(topology / "physical_package_id")
        packages.add(-1 if package is None else package)
    return list(cores.values()), packages


# Lists of the slower CPUs of Intel's hybrid processors, by the kind of their counters.
_SLOW_KINDS = "cpu_atom", "cpu_lowpower"
# Below this share of the fastest a core is of another kind; favoured cores of one kind differ by a tenth at most.
_SLOW = 0.8


def _efficient(root: Path, usable: tuple[int, ...], cores: list[set[int]]) -> tuple[int, ...]:
    """Those of the usable cores that are slower by design: as the kernel lists them, else by what it says of their
    capacity, else by their highest clock.

    Cores with a lower clock that have a second hyperthread as the fast ones do are the same design packed densely;
    they count as equal, since there are mostly more of them than of the others.
    """
    lists = (listed(read(root / f"sys/devices/{kind}/cpus")) for kind in _SLOW_KINDS)
    if named := {cpu for each in lists for cpu in each}:
        return tuple(core for core in usable if core in named)
    base = root / "sys/devices/system/cpu"
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {core: read_int(base / f"cpu{core}" / name) or 0 for core in usable}
        most = max(speeds.values(), default=0)
        if slow := {core for core, speed in speeds.items() if 0 < speed < _SLOW * most}:
            paired = {cpu for core in cores if len(core) > 1 for cpu in core}
            dense = name != "cpu_capacity" and slow <= paired
            return () if dense else tuple(core for core in usable if core in slow)
    return ()


def _caches(root: Path) -> tuple[Cache, ...]:
    """The data caches by level; sharing decides how many there are."""
    online = online_cpus(root)
    found: dict[int, dict[str, int]] = {}
    for cpu in online:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")):
            level, size = read_int(index / "level"), read(index / "size") or ""
            count = whole(size[:-1])
            if level and read(index / "type") in ("Data", "Unified") and count is not None:
                shared = read(index / "shared_cpu_list") or str(cpu)
                found.setdefault(level, {})[shared] = count * _SIZES.get(size[-1], 1)
    return tuple(
        Cache(level, next(iter(copies.values())), len(copies))
        for level, copies in sorted(found.items())
    )
