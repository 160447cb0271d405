"""The teams of threads that run the kernels: how many threads, on which cores, with which memory.

There is one thread per physical core of this process's cpuset, fewer where a container allows less time or cores are
of two speeds (then one per fast core), and one team per NUMA node. Whatever starts threads for the kernels asks here,
so that what is planned, measured and run is the same. The decisions are pure functions of a machine as data.

Cores whose node has no memory for us (no module in its slots, or a cpuset without it) join the team of
the last node before theirs that has some, else of the first: reading far is better than not working.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.errors import UsageError
from ktcli.hardware.machine import Cpu, Node
from ktcli.hardware.numa import AUTO, MAX_TEAMS, Numa
from ktcli.hardware.text import cpu_text, numbered
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.native import Pool, Team


@dataclass(frozen=True, slots=True)
class NodeTeam:
    """The threads of one team and the memory beside them.

    Attributes:
        threads: the number of threads, >= 1.
        cpus: CPUs they are pinned to, one each; () = not pinned.
        memory: OS numbers of the NUMA nodes that hold the team's weights, ascending; () = anywhere.
    """

    threads: int
    cpus: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()


# --- how many threads -----------------------------------------------------------------------------


def team_size(cpu: Cpu, asked: int | None = None) -> int:
    """Returns the number of threads to start: `asked`, else the setting `threads` or KT_THREADS, else `cpu.threads`,
    one per fast core within the CPU quota.

    Raises:
        UsageError: KT_THREADS is not a number of threads, or more threads are asked for than there are cores.
    """
    forced = forced_size(cpu, asked)
    return cpu.threads if forced is None else forced


def forced_size(cpu: Cpu, asked: int | None = None) -> int | None:
    """Returns the number of threads that --threads (`asked`) or else the setting `threads` or KT_THREADS asks for;
    None: none of them does.

    Raises:
        UsageError: KT_THREADS is not a number of threads, or more threads are asked for than there are cores.
    """
    if asked is not None:
        return _within(cpu, asked, f"--threads asks for {asked} threads")
    said = config.stated("threads")
    return (
        None if said.value is None else _within(cpu, said.value, f"{said.source} is {said.value}")
    )


def planned_size(cpu: Cpu, asked: int | None = None, gpus: int = 0) -> int:
    """Returns the number of threads to plan with for a machine other than this one: `asked`, else `cpu.threads` less
    one per GPU, at least 1. KT_THREADS does not apply.

    Args:
        gpus: the number of GPUs in use; each takes a core, for the thread that drives it.
    Raises:
        UsageError: more threads are asked for than there are cores.
    """
    return max(1, cpu.threads - gpus) if asked is None else team_size(cpu, asked)


def _within(cpu: Cpu, threads: int, saying: str) -> int:
    """Returns `threads` if each has a core: a team waits for its slowest thread, and two on a core are slow."""
    cores = max(1, len(cpu.cores))
    if threads <= cores:
        return threads
    raise UsageError(
        f"{saying}, but only {cores} physical core{'s' if cores > 1 else ''} can be used",
        hint=f"kt doctor -v shows the cores of this machine; the default is {cpu.threads},"
        " and more threads than cores would be slower",
    )


def on_nodes(nodes: Sequence[Node], cpu: Cpu, numa: Numa) -> Cpu:
    """Returns `cpu` with only the cores that `numa` allows: those of the listed nodes if it is `nodes=LIST`, else all.

    Raises:
        UsageError: a node of the list does not exist or cannot be used.
    """
    if not numa.nodes:
        return cpu
    usable = {node.id: node for node in nodes if node.cores and node.has_memory}
    wrong = [number for number in numa.nodes if number not in usable]
    if wrong:
        missing = [n for n in wrong if n not in {node.id for node in nodes}]
        named = numbered("node", missing or wrong)[:60]
        why = (
            "there is no" if missing else "this process cannot use both the cores and the memory of"
        )
        raise UsageError(
            f"nodes={cpu_text(numa.nodes)[:60]} was requested, but {why} {named}",
            hint=f"nodes to choose from: {cpu_text(usable) or 'none'}",
        )
    cores = sorted(core for number in numa.nodes for core in usable[number].cores)
    return replace(cpu, cores=tuple(cores))


# --- which teams ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CorePlace:
    """Cores and the memory beside them."""

    cores: tuple[int, ...]
    memory: tuple[int, ...]


def node_teams(
    machine_nodes: Sequence[Node], cpu: Cpu, threads: int, numa: Numa
) -> tuple[NodeTeam, ...]:
    """Returns the teams into which `threads` threads are divided over the NUMA nodes, in the order of the nodes: each
    with its number of threads, the CPUs they are pinned to, and the nodes that hold its memory.

    - Threads are divided in proportion to the teams' cores, at least one per team.
    - With `auto` there is one team per node, but no more than threads or MAX_TEAMS; neighbouring nodes then share one.
    - With N teams on fewer nodes, nodes are split in proportion to their cores; on more nodes, neighbours share a team.
      There are at least N threads. None is pinned if a team has more threads than cores.
    - With `off` there is one team over all cores.
    - A single team is not bound to a node's memory with `off` or `auto`, or if there is only one node to choose from.

    Args:
        threads: at most as many as cores (`team_size`); with `nodes=LIST`, of those nodes (`on_nodes`).
    Raises:
        UsageError: a node of `nodes=LIST` does not exist or cannot be used.
    """
    places = _places(machine_nodes, cpu, numa)
    if not numa.bound or not places:
        return (NodeTeam(threads, pinned_to(cpu, threads)),)
    threads = min(threads, sum(len(place.cores) for place in places))
    count = numa.teams or min(len(places), threads, MAX_TEAMS)
    slots = _merged(places, count) if count <= len(places) else _split(places, count)
    sizes = proportional(max(threads, count), [max(1, len(slot.cores)) for slot in slots])
    pinned = all(size <= len(slot.cores) for size, slot in zip(sizes, slots, strict=True))
    alone = count == 1 and (len(machine_nodes) == 1 or not (numa.nodes or len(places) > 1))
    # `auto` has one team on several nodes only if it has one thread.
    bound = not alone and not (count == 1 and numa == AUTO)
    return tuple(
        NodeTeam(
            threads=size,
            cpus=tuple(sorted(slot.cores[:size])) if pinned else (),
            memory=slot.memory if bound else (),
        )
        for size, slot in zip(sizes, slots, strict=True)
    )


def _places(nodes: Sequence[Node], cpu: Cpu, numa: Numa) -> list[_CorePlace]:
    """The usable memories with their cores of `cpu`, in the order of the nodes' numbers."""
    on_nodes(nodes, cpu, numa)
    chosen = numa.nodes or tuple(sorted(n.id for n in nodes if n.cores and n.has_memory))
    cores: dict[int, list[int]] = {number: [] for number in chosen}
    ours = set(cpu.cores)
    for node in nodes:
        home = node.id if numa.nodes else home_of(node, nodes)
        if home in cores:
            cores[home] += (core for core in node.cores if core in ours)
    slow = set(cpu.efficient)  # threads take the first cores of a place
    return [
        _CorePlace(tuple(sorted(cores[n], key=lambda core: (core in slow, core))), (n,))
        for n in chosen
        if cores[n]
    ]


def home_of(node: Node, nodes: Sequence[Node]) -> int | None:
    """Returns the number of the NUMA node whose memory the cores of `node` use: its own if it has usable memory, else
    that of the last node before it with memory and cores, else of the first such node; None: there is none.
    """
    if node.has_memory:
        return node.id
    usable = sorted(other.id for other in nodes if other.cores and other.has_memory)
    return max((n for n in usable if n < node.id), default=usable[0] if usable else None)


def _merged(places: Sequence[_CorePlace], count: int) -> list[_CorePlace]:
    """Merges neighbours into `count` groups; the first cores of a group come from all its nodes."""
    edges = [len(places) * i // count for i in range(count + 1)]
    groups = [places[first:last] for first, last in pairwise(edges)]
    return [
        _CorePlace(tuple(_in_turn(group)), tuple(p.memory[0] for p in group)) for group in groups
    ]


def _in_turn(group: Sequence[_CorePlace]) -> Iterator[int]:
    for cores in zip_longest(*(place.cores for place in group)):
        yield from (core for core in cores if core is not None)


def _split(places: Sequence[_CorePlace], count: int) -> list[_CorePlace]:
    """Splits nodes into `count` parts in all; a part may have no core of its own."""
    pieces = proportional(count, [len(place.cores) for place in places])
    return [
        _CorePlace(
            place.cores[len(place.cores) * i // n : len(place.cores) * (i + 1) // n], place.memory
        )
        for place, n in zip(places, pieces, strict=True)
        for i in range(n)
    ]


def proportional(count: int, weights: Sequence[int]) -> list[int]:
    """Returns the sizes of len(weights) parts, each at least 1, that sum to `count` and are as close to proportional to
    the weights (> 0) as possible; `count` >= len(weights).

    No part is larger than its weight unless `count` is larger than their sum.
    """
    total = sum(weights)
    parts = [max(1, count * weight // total) for weight in weights]

    def missing(i: int) -> int:
        return count * weights[i] - parts[i] * total

    while sum(parts) < count:
        parts[max(range(len(parts)), key=missing)] += 1
    while sum(parts) > count:
        parts[min((i for i, part in enumerate(parts) if part > 1), key=missing)] -= 1
    return parts


def bound_nodes(teams: Sequence[Team]) -> int:
    """Returns the number of different sets of NUMA nodes to whose memory teams are bound; 1 if no team is bound."""
    return max(1, len({team.memory for team in teams if team.memory}))


# --- starting them --------------------------------------------------------------------------------


def teams_here(
    nodes: Sequence[Node], cpu: Cpu, threads: int | None, numa: Numa
) -> tuple[NodeTeam, ...]:
    """Returns the thread teams (threads, CPUs, NUMA nodes) that a command would start on this machine now, with as many
    threads as `team_size` returns for `threads`.

    Raises:
        UsageError: too many threads are asked for, or a node of `nodes=LIST` does not exist or cannot be used.
    """
    return node_teams(nodes, cpu, team_size(on_nodes(nodes, cpu, numa), threads), numa)


def pinned_to(cpu: Cpu, threads: int) -> tuple[int, ...]:
    """Returns the CPU numbers that one team of `threads` threads over all cores is pinned to, ascending, one per
    thread; () if there are more threads than cores: they are not pinned.
    """
    if threads > len(cpu.cores):
        return ()
    slow = set(cpu.efficient)
    return tuple(sorted(sorted(cpu.cores, key=lambda core: core in slow)[:threads]))


def make_team(
    teams: Sequence[NodeTeam],
    *,
    isa: str | None = None,
    tile_min: tuple[int, int, int] | None = None,
) -> Pool:
    """Returns a thread pool with the threads of all `teams` started, and pinned to the teams' CPUs if they have any.

    Args:
        isa: the row of kernels; None: KT_ISA, else the best.
        tile_min: the fewest tokens per expert for which tiles are used (see `measure.tiles`); None: the library's own
            default.
    Raises:
        NativeError: the native library is missing or refuses the row.
    """
    from ktcli.native import Pool

    pins = [number for team in teams for number in team.cpus]
    size = sum(team.threads for team in teams)
    return Pool(size, isa=isa, cpus=pins or None, teams=teams, tile_min=tile_min)
