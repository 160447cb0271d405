"""A machine as data: the planner plans for it, `kt doctor` shows it, a profile describes it.

Nothing here reads the system; `probe` does. A fact that is not known is None, never a guess. Core
numbers are the system's own; only one CPU of each physical core is listed, because a second
hyperthread of a core adds nothing to work that waits for memory.
"""

from __future__ import annotations

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Cache:
    """One level of data cache, as the first CPU sees it."""

    level: int
    size_bytes: int
    count: int  # caches of this level in the machine


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, and the part of it that this process may use.

    Attributes:
        model: the marketing name; None where the system does not say.
        isa: rows of kernels that run here, best first; empty if the native library is missing.
        flags: features the system reports that kt looks at, e.g. "avx512_vnni", "amx_int8".
        sockets, physical_cores, logical_cpus: counts of the whole machine, online only.
        cores: one CPU number per physical core of this process's cpuset: where threads are pinned.
        efficient: those of them that are slower by design; (): all are alike, or nobody knows.
        quota: the CPU time that a container limit allows, in CPUs; None: no limit.
    """

    model: str | None
    isa: tuple[str, ...]
    flags: tuple[str, ...]
    sockets: int
    physical_cores: int
    logical_cpus: int
    cores: tuple[int, ...]
    quota: float | None = None
    caches: tuple[Cache, ...] = ()
    efficient: tuple[int, ...] = ()

    @property
    def fast(self) -> tuple[int, ...]:
        """The numbers of the cores that threads run on by default, one CPU number per physical core. Efficiency cores
        are left out unless there are no others, as a team waits for its slowest thread.
        """
        slow = set(self.efficient)
        return tuple(core for core in self.cores if core not in slow) or self.cores

    @property
    def threads(self) -> int:
        """The default number of threads: one per fast core, but no more than the CPU quota,
        rounded down; at least 1.
        """
        return max(
            1, len(self.fast) if self.quota is None else min(len(self.fast), int(self.quota))
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory in bytes.

    Attributes:
        available_bytes: memory available without swapping, page cache given up.
        limit_bytes, used_bytes: the container's limit, and its use without page cache; None: no limit.
        swap_bytes: size of all swap.
        huge_pages: mode of transparent huge pages: "always", "madvise", "never"; None: unknown.
        huge_free_bytes: reserved huge pages that are free.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    used_bytes: int | None = None
    swap_bytes: int = 0
    huge_pages: str | None = None
    huge_free_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The bytes of main memory that a new process may take: available on the machine, and within the container's
        limit.
        """
        if self.limit_bytes is None:
            return self.available_bytes
        return max(0, min(self.available_bytes, self.limit_bytes - (self.used_bytes or 0)))


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node: a memory with the cores beside it.

    Attributes:
        cores: physical cores of this process's cpuset; empty for a memory without CPUs.
        free_bytes: bytes unused or easily given up.
        allowed: whether this process may use its memory (a cpuset can forbid it).
    """

    id: int
    cores: tuple[int, ...]
    size_bytes: int
    free_bytes: int
    allowed: bool = True

    @property
    def has_memory(self) -> bool:
        """Whether the NUMA node has memory that this process may use."""
        return self.allowed and self.size_bytes > 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU.

    Attributes:
        link_bps: bytes per second of its PCIe link in one direction, on paper; None: unknown.
        capability: CUDA compute capability, e.g. "9.0".
        read_bps, bf16_ops: bytes per second read from its memory, bf16 operations per second (a multiply
            and an add are two), measured; None: not measured, and `datasheet` says what is assumed.
        copy_bps: bytes per second copied to it from pinned memory, measured; None: not measured.
    """

    index: int
    name: str
    vram_bytes: int
    free_bytes: int
    link_bps: float | None = None
    capability: str | None = None
    driver: str | None = None
    read_bps: float | None = None
    bf16_ops: float | None = None
    copy_bps: float | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of the library folder.

    Attributes:
        rotational: whether it has a spinning platter; None: unknown.
    """

    path: str
    size_bytes: int
    free_bytes: int
    rotational: bool | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The rates that `kt doctor --measure` found, with `threads` threads of kernel row `isa`, all cores at once.

    Attributes:
        read_bps: bytes per second read from memory.
        int8_ops, bf16_ops: operations per second; a multiply and an add are two.
        date: the day of the measurement, YYYY-MM-DD.
        nodes: the number of NUMA nodes that were read at once, each by the team bound to it; 1: memory anywhere.
    """

    isa: str
    threads: int
    read_bps: float
    int8_ops: float
    bf16_ops: float
    date: str
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine that the planner may use.

    Attributes:
        measured: None until somebody has measured.
        gpus_unread: what the driver says of GPUs that cannot be used.
    """

    name: str
    system: str
    cpu: Cpu
    memory: Memory
    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...] = ()
    disk: Disk | None = None
    measured: Measured | None = None
    gpus_unread: tuple[str, ...] = ()

    @property
    def worker_nodes(self) -> tuple[Node, ...]:
        """The NUMA nodes with cores that this process may use; nodes that are only memory are left out."""
        return tuple(node for node in self.nodes if node.cores)
