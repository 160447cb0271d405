"""Reduces the facts of the hardware probe to those that the planner needs.

Threads are physical cores of this process's cpuset, of two kinds the fast ones: a second hyperthread adds nothing to
loops that already fill a core's ports or its memory queue, and a team waits for its slowest thread. Memory is what is
available now, within the cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ktcli.errors import gib
from ktcli.hardware.machine import Gpu, Machine, Node
from ktcli.hardware.numa import AUTO, OFF, Numa
from ktcli.hardware.team import NodeTeam, bound_nodes, node_teams, on_nodes, planned_size
from ktcli.hardware.text import numbered
from ktcli.planner import memory
from ktcli.planner.cost import (
    CORE_READ_BPS,
    ROWS,
    TILE_BASIS,
    Rates,
    assumed_rates,
    assumed_read_bps,
    has_tiles,
    operation_seconds,
)
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The facts about a machine that the planner uses.

    Attributes:
        name: the name for people, e.g. "AMD EPYC, 2 cores".
        threads: the threads of all teams.
        isa: the row of kernels.
        total_bytes: the most memory that this process may use.
        available_bytes: the part of it that is free now.
        rates: the rates of `threads` threads.
        notes: what the user should know, a sentence each.
        teams: the teams of threads; (): one, bound to no memory.
        nodes: the nodes that the teams' memory is bound to; (): nothing is bound.
        gpus: the GPUs that a plan may use.
        beside: the same machine when GPUs are used: one works at a time, and takes a core; None: there is none.
    """

    name: str
    threads: int
    isa: str
    total_bytes: int
    available_bytes: int
    rates: Rates
    notes: tuple[str, ...] = ()
    teams: tuple[NodeTeam, ...] = ()
    nodes: tuple[Node, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    beside: Host | None = None

    @property
    def margin_bytes(self) -> int:
        """The bytes of main memory that a plan leaves free on this machine."""
        return memory.margin_bytes(self.total_bytes)

    @property
    def room_bytes(self) -> int:
        """The bytes of main memory that a plan may use: those available, less those left free; may be negative."""
        return self.available_bytes - self.margin_bytes

    @property
    def spread_words(self) -> str:
        """A phrase for where memory shared by all teams of threads lies: "memory", or "nodes 0-1, interleaved"."""
        return f"{node_words(self.nodes)}, interleaved" if self.nodes else "memory"

    @property
    def cut_words(self) -> str:
        """A phrase for where weights cut between the teams of threads lie: "nodes 0-1, cut between 2 teams"."""
        return f"{node_words(self.nodes)}, cut between {len(self.teams)} teams"

    def on_one_team(self) -> Host:
        """Returns the facts of the same machine with one team of threads, whose memory is bound to no NUMA node."""
        beside = None if self.beside is None else self.beside.on_one_team()
        return replace(self, teams=(), nodes=(), beside=beside)


def host_of(
    machine: Machine,
    *,
    threads: int | None = None,
    isa: str | None = None,
    numa: Numa = AUTO,
    torch: bool = False,
) -> Host:
    """Returns the facts of `machine` that the planner needs: threads, teams, memory, rates and GPUs.

    Args:
        threads: the forced number of threads; None: one per fast core within the CPU quota, and one less in `beside`.
        isa: the forced row of kernels; None: the best.
        torch: whether PyTorch is installed, without which no GPU can be used.
    Raises:
        UsageError: more threads than cores, or `numa` names nodes that cannot be used.
    """
    asked = _Asked(threads, isa, numa)
    host = _host(machine, asked, 0)
    if not torch:
        return replace(host, notes=(*_idle(machine), *host.notes))
    if not machine.gpus:
        return host
    return replace(host, gpus=machine.gpus, beside=_host(machine, asked, 1))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The choices that are forced; None: they are not."""

    threads: int | None
    isa: str | None
    numa: Numa


def _host(machine: Machine, asked: _Asked, gpus: int) -> Host:
    """The host with `gpus` GPUs at work at the same time."""
    numa = asked.numa
    cpu = on_nodes(machine.nodes, machine.cpu, numa)
    teams = node_teams(machine.nodes, cpu, planned_size(cpu, asked.threads, gpus), numa)
    isa = asked.isa or _best_row(machine)
    bound = {number for team in teams for number in team.memory}
    counted = [node for node in machine.nodes if node.id in bound] or _near_nodes(machine)
    size = sum(team.threads for team in teams)
    found, others = machine.memory, [node for node in machine.nodes if node not in counted]
    near_bytes = found.total_bytes - sum(node.size_bytes for node in others)
    free_bytes = found.available_bytes - sum(node.free_bytes for node in others)
    return Host(
        name=f"{machine.cpu.model or machine.name}, {size} thread{'s' if size > 1 else ''}",
        threads=size,
        isa=isa,
        total_bytes=min(near_bytes, found.limit_bytes or near_bytes),
        available_bytes=max(0, min(found.free_bytes, free_bytes)),
        rates=_rates(machine, teams, isa),
        notes=tuple(_notes(machine, teams, numa, counted)),
        teams=teams,
        nodes=tuple(counted) if bound else (),
    )


def _idle(machine: Machine) -> Iterator[str]:
    """Yields the note on GPUs that cannot be used."""
    for gpu in machine.gpus:
        yield (
            f"kt runs every layer on the CPU and does not use {gpu.name} ({gib(gpu.vram_bytes)}), because PyTorch is"
            ' not installed (pip install "ktcli[gpu]")'
        )


def _near_nodes(machine: Machine) -> list[Node]:
    """The nodes whose memory has cores beside it. Other memory (a CXL card, for example) is not planned with,
    since nothing is known of its speed, unless there is nothing else."""
    ours = [node for node in machine.nodes if node.has_memory]
    return [node for node in ours if node.cores] or ours or list(machine.nodes)


def _best_row(machine: Machine) -> str:
    """The best row that the machine runs and this version has; by its flags where nobody asked."""
    flags, runs = set(machine.cpu.flags), ROWS.keys() & set(machine.cpu.isa)
    return next(
        name for name, row in ROWS.items() if (name in runs if runs else row.flags <= flags)
    )


def _rates(machine: Machine, teams: Sequence[NodeTeam], isa: str) -> Rates:
    """The measured rates, scaled to another thread count; assumed ones if the row was not measured, or with
    memory bound otherwise."""
    threads, cores = sum(team.threads for team in teams), machine.cpu.threads
    found = machine.measured
    if found is None or found.isa != isa or found.nodes != bound_nodes(teams):
        # More threads than cores, or than the container's time is for, get no more done.
        useful = min(threads, cores) / threads
        assumed = assumed_rates(isa, threads * useful, _assumed_read_bps(machine, teams, useful))
        return replace(assumed, operation_s=operation_seconds(threads))
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
        operation_s=operation_seconds(threads),
    )


def _assumed_read_bps(machine: Machine, teams: Sequence[NodeTeam], useful: float) -> float:
    """The assumed bandwidth, summed over the memories that teams are bound to; unbound teams count on one node."""
    threads: dict[tuple[int, ...], int] = {}
    for team in teams:
        threads[team.memory] = threads.get(team.memory, 0) + team.threads
    anywhere = max(1, len(machine.worker_nodes))
    return sum(assumed_read_bps(n * useful, len(ids) or anywhere) for ids, n in threads.items())


def _notes(
    machine: Machine, teams: Sequence[NodeTeam], numa: Numa, counted: Sequence[Node]
) -> Iterator[str]:
    threads, cpu = sum(team.threads for team in teams), machine.cpu
    if threads > len(cpu.cores):
        yield f"{len(teams)} teams on {len(cpu.cores)} cores: for testing, not for speed"
    elif threads > len(cpu.fast):
        yield (
            f"{threads} threads include efficiency cores: each step waits for the slowest of them"
        )
    elif threads > cpu.threads:
        yield (
            f"a container limit allows the CPU time of {cpu.quota:g} cores: {threads} threads are slower,"
            " not faster"
        )
    if numa == OFF and len(machine.worker_nodes) > 1:
        yield (
            f"--numa off on {len(machine.worker_nodes)} nodes: weights may be on any node, so the plan"
            " assumes the bandwidth of one"
        )
    yield from _memory_notes(machine, numa, counted)


def _memory_notes(machine: Machine, numa: Numa, counted: Sequence[Node]) -> Iterator[str]:
    """Yields a note on each part of the machine's memory that the plan does not count, and why."""
    others = [node for node in machine.nodes if node not in counted and node.size_bytes]
    reasons = {
        "which this process may not use (its cpuset)": [n for n in others if not n.allowed],
        "without cores": [n for n in others if n.allowed and not n.cores],
        f"that --numa {numa} leaves out": [n for n in others if n.has_memory and n.cores],
    }
    for reason, nodes in reasons.items():
        if nodes:
            size = gib(sum(node.size_bytes for node in nodes))
            yield f"the plan does not count {size} of memory on {node_words(nodes)} {reason}"


def node_words(nodes: Sequence[Node]) -> str:
    """Returns a phrase for NUMA nodes: "node 2", "nodes 0-3"."""
    return numbered("node", [node.id for node in nodes])
