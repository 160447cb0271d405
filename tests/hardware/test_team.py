"""How many threads run the kernels, in which teams, and where."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hardware.trees import TREES, build

from ktcli.errors import UsageError
from ktcli.hardware.machine import Cpu, Machine, Node
from ktcli.hardware.numa import AUTO, OFF, Numa, asked_numa, parse_numa
from ktcli.hardware.probe import probe
from ktcli.hardware.team import (
    NodeTeam,
    make_team,
    node_teams,
    on_nodes,
    planned_size,
    proportional,
    team_size,
    teams_here,
)

CPU = Cpu(None, (), (), 1, 4, 8, cores=(0, 2, 4, 6))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)


# --- how many threads -------------------------------------------------------------------------------


def test_one_thread_per_core_and_no_more_than_the_time_allowed():
    assert team_size(CPU) == 4
    assert team_size(replace(CPU, quota=2.5)) == 2


def test_what_is_asked_for_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KT_THREADS", "3")
    assert team_size(CPU) == 3
    assert team_size(CPU, 1) == 1


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        UsageError, match=r"--threads asks for 5 threads.* 4 physical cores"
    ) as found:
        team_size(CPU, 5)
    assert "kt doctor" in found.value.hint
    with pytest.raises(UsageError, match="only 1 physical core can"):
        team_size(replace(CPU, cores=(6,)), 2)
    monkeypatch.setenv("KT_THREADS", "99")
    with pytest.raises(UsageError, match="KT_THREADS is 99"):
        team_size(CPU)
    assert team_size(replace(CPU, quota=1.0), 4) == 4  # the cores are there, if not all of the time


# --- what --numa says -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numa"),
    [
        ("auto", AUTO),
        (" OFF ", OFF),
        ("1", Numa(1)),
        ("16", Numa(16)),
        ("nodes=0,2-3", Numa(nodes=(0, 2, 3))),
        ("nodes=3,0,0", Numa(nodes=(0, 3))),
    ],
)
def test_values(text: str, numa: Numa):
    assert parse_numa(text) == numa
    assert parse_numa(str(numa)) == numa


BAD = ("", "on", "0", "17", "-1", "1.5", "²", "nodes", "nodes=", "nodes=a", "nodes=3-1", "nodes=1_0",
       "nodes=0,,1", "nodes=0;1", "nodes=99999999999", "nodes=" + "9" * 5000, "9" * 5000)  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_values_that_make_no_sense(text: str):
    with pytest.raises(UsageError, match=r"KT_NUMA (is|must be)") as found:
        parse_numa(text, "KT_NUMA")
    assert len(str(found.value)) < 150
    assert "nodes=0,2-3" in found.value.hint


def test_the_option_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert asked_numa(None) == AUTO
    monkeypatch.setenv("KT_NUMA", "off")
    assert asked_numa(None) == OFF
    assert asked_numa("2") == Numa(2)
    monkeypatch.setenv("KT_NUMA", "some")
    with pytest.raises(UsageError, match="KT_NUMA is 'some'"):
        asked_numa(None)


# --- which teams ------------------------------------------------------------------------------------

# tree → value of --numa → (threads, memory) of each team
TEAMS: dict[str, dict[str, list[tuple[int, tuple[int, ...]]]]] = {
    "desktop": {
        "auto": [(8, ())],
        "off": [(8, ())],
        "1": [(8, ())],
        "2": [(4, (0,)), (4, (0,))],
        "3": [(2, (0,)), (3, (0,)), (3, (0,))],
        "nodes=0": [(8, ())],
    },
    "two-sockets": {
        "auto": [(32, (0,)), (32, (1,))],
        "off": [(64, ())],
        "1": [(64, (0, 1))],
        "2": [(32, (0,)), (32, (1,))],
        "3": [(16, (0,)), (16, (0,)), (32, (1,))],
        "4": [(16, (0,)), (16, (0,)), (16, (1,)), (16, (1,))],
        "nodes=1": [(32, (1,))],
    },
    "snc-4": {
        "auto": [(12, (0,)), (12, (1,)), (12, (2,)), (12, (3,))],
        "off": [(48, ())],
        "2": [(24, (0, 1)), (24, (2, 3))],
        "3": [(12, (0,)), (12, (1,)), (24, (2, 3))],
        "nodes=0,2-3": [(12, (0,)), (12, (2,)), (12, (3,))],
    },
    "snc-8": {
        "auto": [(8, (n,)) for n in range(8)],
        "2": [(32, (0, 1, 2, 3)), (32, (4, 5, 6, 7))],
        "16": [(4, (n // 2,)) for n in range(16)],
    },
    "epyc-nps4": {"auto": [(16, (n,)) for n in range(4)], "1": [(64, (0, 1, 2, 3))]},
    "cxl-memory": {"auto": [(16, ())], "off": [(16, ())], "2": [(8, (0,)), (8, (0,))], "nodes=0": [(16, (0,))]},
    "odd-node-ids": {"auto": [(8, (2,)), (8, (3,))], "1": [(16, (2, 3))], "nodes=3": [(8, (3,))]},
    "offline-cores": {"auto": [(6, ())]},
    "smt-off": {"auto": [(4, ())], "4": [(1, (0,))] * 4},
    "container": {"auto": [(2, ())], "off": [(2, ())], "2": [(1, (0,)), (1, (0,))]},  # 2.5 CPUs of time
    "container-v1": {"auto": [(4, ())]},
    "container-mems": {"auto": [(16, ())], "2": [(8, (1,)), (8, (1,))], "nodes=1": [(8, (1,))]},
    "no-memory-node": {"auto": [(16, ())], "2": [(8, (0,)), (8, (0,))]},
    "throttled": {"auto": [(4, ())]},
    "hybrid": {"auto": [(8, ())], "2": [(4, (0,)), (4, (0,))]},
    "unequal-nodes": {
        "auto": [(8, (0,)), (3, (1,))],
        "1": [(11, (0, 1))],
        "3": [(4, (0,)), (4, (0,)), (3, (1,))],
    },
    "bare": {"auto": [(2, ())], "4": [(1, (0,))] * 4},
}  # fmt: skip


def recorded(name: str, root: Path) -> Machine:
    return probe(build(TREES[name], root))


def test_every_tree_has_its_row():
    assert set(TEAMS) == set(TREES)


@pytest.mark.parametrize("name", TEAMS)
def test_teams_of_recorded_machines(name: str, tmp_path: Path):
    machine = recorded(name, tmp_path)
    for text, expected in TEAMS[name].items():
        teams = teams_here(machine.nodes, machine.cpu, None, parse_numa(text))
        assert [(team.threads, team.memory) for team in teams] == expected, text


@pytest.mark.parametrize("name", TREES)
def test_what_holds_for_all_teams(name: str, tmp_path: Path):
    machine = recorded(name, tmp_path)
    homes = {core: node.id for node in machine.nodes for core in node.cores if node.has_memory}
    cores = len(machine.cpu.cores)
    for numa in (AUTO, OFF, *map(Numa, range(1, 17))):
        for threads in range(1, cores + 1):
            teams = node_teams(machine.nodes, machine.cpu, threads, numa)
            assert sum(team.threads for team in teams) == max(threads, numa.teams or 1)
            pins = [cpu for team in teams for cpu in team.cpus]
            if (numa.teams or 1) <= cores:
                assert all(len(team.cpus) == team.threads for team in teams)
                assert len(set(pins)) == len(pins)
                assert set(pins) <= set(machine.cpu.cores)
            else:
                assert pins == []
            for team in teams:
                if team.memory:
                    assert {homes.get(cpu, team.memory[0]) for cpu in team.cpus} <= {*team.memory}


def test_threads_run_on_the_fast_cores_first(tmp_path: Path):
    machine = recorded("hybrid", tmp_path)
    fast = (0, 2, 4, 6, 16, 18, 20, 22)
    for numa in (AUTO, OFF):
        (team,) = node_teams(machine.nodes, machine.cpu, 8, numa)
        assert team.cpus == fast
        (team,) = node_teams(machine.nodes, machine.cpu, 9, numa)
        assert team.cpus == tuple(sorted((*fast, 8)))


def test_fewer_threads_than_nodes_are_as_many_teams_over_all_memory(tmp_path: Path):
    machine = recorded("snc-8", tmp_path)
    teams = node_teams(machine.nodes, machine.cpu, 3, AUTO)
    assert [team.memory for team in teams] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [team.cpus for team in teams] == [(0,), (16,), (40,)]
    assert node_teams(machine.nodes, machine.cpu, 1, AUTO) == (NodeTeam(1, (0,)),)


def test_the_threads_of_a_team_on_two_nodes_run_on_both(tmp_path: Path):
    machine = recorded("two-sockets", tmp_path)
    (team,) = node_teams(machine.nodes, machine.cpu, 4, Numa(1))
    assert team == NodeTeam(4, (0, 1, 32, 33), (0, 1))


def test_cores_without_memory_join_the_node_before(tmp_path: Path):
    nodes = tuple(Node(i, (2 * i, 2 * i + 1), size, 0) for i, size in enumerate((0, 1, 0, 1)))
    cpu = replace(CPU, cores=tuple(range(8)))
    teams = node_teams(nodes, cpu, 8, AUTO)
    assert [(team.cpus, team.memory) for team in teams] == [
        ((0, 1, 2, 3, 4, 5), (1,)),
        ((6, 7), (3,)),
    ]
    nowhere = tuple(replace(node, allowed=False) for node in nodes)
    assert node_teams(nowhere, cpu, 8, AUTO) == (NodeTeam(8, cpu.cores),)


def test_nodes_that_are_asked_for_must_be_usable(tmp_path: Path):
    machine = recorded("unequal-nodes", tmp_path)
    for numbers, words in [
        ((7,), "nodes=7 was requested, but there is no node 7"),
        ((0, 2), "the memory of node 2"),
    ]:
        with pytest.raises(UsageError, match=words) as found:
            node_teams(machine.nodes, machine.cpu, 1, Numa(nodes=numbers))
        assert "nodes to choose from: 0-1" in found.value.hint


def test_threads_are_counted_on_the_nodes_that_were_asked_for(tmp_path: Path):
    machine = recorded("two-sockets", tmp_path)
    one = Numa(nodes=(1,))
    assert on_nodes(machine.nodes, machine.cpu, one).cores == tuple(range(32, 64))
    with pytest.raises(UsageError, match=r"33 threads.* 32 physical cores"):
        teams_here(machine.nodes, machine.cpu, 33, one)


@pytest.mark.parametrize("seed", range(100))
def test_parts_are_in_proportion(seed: int):
    draw = random.Random(seed)
    weights = [draw.randrange(1, 65) for _ in range(draw.randrange(1, 17))]
    total = sum(weights)
    count = draw.randrange(len(weights), total + 1)
    parts = proportional(count, weights)
    assert sum(parts) == count
    assert all(1 <= part <= weight for part, weight in zip(parts, weights, strict=True))
    if count * min(weights) >= total:  # the least part is no forced one
        exact = [count * weight / total for weight in weights]
        assert all(abs(part - e) < 1 for part, e in zip(parts, exact, strict=True))


def test_what_is_started(monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[int, dict[str, object]]] = []
    monkeypatch.setattr("ktcli.native.Pool", lambda size, **words: started.append((size, words)))
    nodes = tuple(Node(i, (4 * i, 4 * i + 2), 1, 1) for i in (0, 1))
    make_team(node_teams(nodes, CPU, 3, AUTO))
    make_team(node_teams(nodes, CPU, 3, Numa(8)))
    ((size, words), (pretend, unpinned)) = started
    assert (size, words["cpus"]) == (3, [0, 2, 4])
    assert words["teams"] == (NodeTeam(2, (0, 2), (0,)), NodeTeam(1, (4,), (1,)))
    assert (pretend, unpinned["cpus"]) == (8, None)


def test_a_team_runs_the_row_that_was_asked_for():
    team = make_team((NodeTeam(1, (0,)),), isa="portable")
    assert (team.threads, team.isa) == (1, "portable")


def test_each_gpu_takes_a_core_unless_threads_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    assert [planned_size(CPU, None, gpus) for gpus in (0, 1, 3, 9)] == [4, 3, 1, 1]
    assert planned_size(CPU, 4, gpus=1) == 4
    assert planned_size(replace(CPU, quota=2.5), None, gpus=1) == 1
    monkeypatch.setenv("KT_THREADS", "4")
    assert team_size(CPU) == 4
    assert planned_size(CPU, None, gpus=1) == 3  # KT_THREADS speaks of this machine only
