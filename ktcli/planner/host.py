"""What the planner needs to know of a machine, boiled down from the hardware probe's facts.

Threads are physical cores of this process's cpuset: a second hyperthread adds nothing to loops that
already fill a core's ports or its memory queue. Memory is what is available now, within the cgroup.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.errors import gib
from ktcli.hardware.machine import Machine, Node
from ktcli.planner import memory
from ktcli.planner.cost import CORE_READ_BPS, ROWS, TILE_BASIS, Rates, assumed_rates, has_tiles


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as the planner sees it.

    Attributes:
        name: for people, e.g. "AMD EPYC, 2 cores".
        threads: of the team.
        isa: row of kernels.
        total_bytes: memory this process may use at most.
        available_bytes: of it, free now.
        rates: what `threads` threads can do.
        notes: what the user should know, a sentence each.
    """

    name: str
    threads: int
    isa: str
    total_bytes: int
    available_bytes: int
    rates: Rates
    notes: tuple[str, ...] = ()

    @property
    def margin_bytes(self) -> int:
        """Memory that a plan leaves free."""
        return memory.margin_bytes(self.total_bytes)

    @property
    def room_bytes(self) -> int:
        """Memory that a plan may use."""
        return self.available_bytes - self.margin_bytes


def host_of(machine: Machine, *, threads: int | None = None, isa: str | None = None) -> Host:
    """What the planner needs of `machine`.

    Args:
        threads: forced; None = one per physical core of the cpuset.
        isa: forced row; None = the best.
    """
    threads = threads or machine.cpu.threads
    isa = isa or _best_row(machine)
    found, far = machine.memory, _far_nodes(machine)
    near_bytes = found.total_bytes - sum(node.size_bytes for node in far)
    free_bytes = found.available_bytes - sum(node.free_bytes for node in far)
    return Host(
        name=f"{machine.cpu.model or machine.name}, {threads} threads",
        threads=threads,
        isa=isa,
        total_bytes=min(near_bytes, found.limit_bytes or near_bytes),
        available_bytes=max(0, min(found.free_bytes, free_bytes)),
        rates=_rates(machine, threads, isa),
        notes=tuple(_notes(machine, threads)),
    )


def _far_nodes(machine: Machine) -> tuple[Node, ...]:
    """Memory without cores beside it (a CXL card, for example): not planned with, since nothing is
    known of its speed."""
    return tuple(node for node in machine.nodes if not node.cores) if machine.worker_nodes else ()


def _best_row(machine: Machine) -> str:
    """The best row that the machine runs and this version has; by its flags where nobody asked."""
    flags, runs = set(machine.cpu.flags), ROWS.keys() & set(machine.cpu.isa)
    return next(
        name for name, row in ROWS.items() if (name in runs if runs else row.flags <= flags)
    )


def _rates(machine: Machine, threads: int, isa: str) -> Rates:
    """Measured rates, scaled to another thread count; assumed ones if the row was not measured."""
    found = machine.measured
    if found is None or found.isa != isa:
        return assumed_rates(isa, _threads_per_node(machine, threads))
    cores = machine.cpu.threads
    # A core more brings its arithmetic; beyond the cores there is nothing more to have.
    scale = min(threads, cores) / min(found.threads, cores)
    read = min(found.read_bps * max(scale, 1.0), CORE_READ_BPS * threads)
    basis = f"measured {found.date} with {found.threads} threads"
    if scale != 1.0:
        basis = f"{basis}, scaled to {threads}"
    return Rates(
        read_bps=found.read_bps if scale == 1.0 else read,
        int8_ops=found.int8_ops * scale,
        bf16_ops=found.bf16_ops * scale,
        measured=True,
        basis=f"{basis}; {TILE_BASIS}" if has_tiles(isa) else basis,
        tiles=has_tiles(isa),
    )


def _threads_per_node(machine: Machine, threads: int) -> tuple[int, ...]:
    """The team spread over the nodes in proportion to their cores; never more than there are cores."""
    cores = [len(node.cores) for node in machine.worker_nodes] or [machine.cpu.threads]
    used = min(threads, sum(cores), machine.cpu.threads)
    shares = [used * n // sum(cores) for n in cores]
    for i in range(used - sum(shares)):
        shares[i % len(shares)] += 1
    return tuple(share for share in shares if share)


def _notes(machine: Machine, threads: int) -> list[str]:
    notes = [
        f"{gpu.name} with {gib(gpu.vram_bytes)} of memory is there; this version runs every layer on"
        " the CPU and does not use it"
        for gpu in machine.gpus
    ]
    cores = machine.cpu.threads
    if threads > cores:
        notes.append(
            f"{threads} threads are more than the {cores} cores they may use: slower, not faster"
        )
    far = sum(node.size_bytes for node in _far_nodes(machine))
    if far:
        notes.append(f"{gib(far)} of memory on nodes without cores is not counted")
    nodes = len(machine.worker_nodes)
    if nodes > 1:
        notes.append(
            f"{nodes} NUMA nodes: this version does not bind weights to a node, so the plan counts on"
            " the bandwidth of one"
        )
    return notes
