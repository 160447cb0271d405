"""Reading machines from recorded trees: cores, nodes, memory, limits, GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hardware.trees import TREES, Tree, build

from ktcli.hardware import profile
from ktcli.hardware.gpu import read_gpus
from ktcli.hardware.machine import Machine, Measured
from ktcli.hardware.numa import AUTO, OFF, Numa
from ktcli.hardware.probe import probe
from ktcli.hardware.text import cpu_list, cpu_text
from ktcli.measure.rates import save
from ktcli.planner.host import host_of

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("tree") / request.param
    return probe(build(TREES[request.param], folder))


# tree: sockets, physical cores of the machine, of this process, threads, cores per node
EXPECTED = {
    "desktop": (1, 8, 8, 8, {0: 8}),
    "two-sockets": (2, 64, 64, 64, {0: 32, 1: 32}),
    "snc-4": (2, 48, 48, 48, {0: 12, 1: 12, 2: 12, 3: 12}),
    "snc-8": (2, 64, 64, 64, dict.fromkeys(range(8), 8)),
    "epyc-nps4": (1, 64, 64, 64, {0: 16, 1: 16, 2: 16, 3: 16}),
    "cxl-memory": (1, 16, 16, 16, {0: 16, 2: 0}),
    "odd-node-ids": (2, 16, 16, 16, {2: 8, 3: 8}),
    "offline-cores": (1, 6, 6, 6, {0: 6}),
    "smt-off": (1, 4, 4, 4, {0: 4}),
    "container": (1, 16, 3, 2, {0: 3}),
    "container-v1": (1, 8, 8, 4, {0: 8}),
    "throttled": (1, 4, 4, 4, {0: 4}),
    "hybrid": (1, 24, 24, 8, {0: 24}),
    "container-mems": (2, 32, 16, 16, {0: 8, 1: 8}),
    "no-memory-node": (2, 16, 16, 16, {0: 8, 1: 8, 2: 0}),
    "unequal-nodes": (1, 24, 11, 11, {0: 8, 1: 3, 2: 0, 3: 0}),
    "bare": (1, 2, 2, 2, {0: 2}),
}


def test_every_tree_has_its_row() -> None:
    assert set(EXPECTED) == set(TREES)


@pytest.mark.parametrize("machine", EXPECTED, indirect=True)
def test_cores_and_nodes(machine: Machine) -> None:
    sockets, physical, usable, threads, nodes = EXPECTED[machine.name]
    assert machine.cpu.sockets == sockets
    assert machine.cpu.physical_cores == physical
    assert len(machine.cpu.cores) == usable
    assert machine.cpu.threads == threads
    assert {node.id: len(node.cores) for node in machine.nodes} == nodes


@pytest.mark.parametrize("machine", EXPECTED, indirect=True)
def test_the_cores_of_the_nodes_are_the_cores(machine: Machine) -> None:
    assert sorted(core for node in machine.nodes for core in node.cores) == list(machine.cpu.cores)


@pytest.mark.parametrize("machine", EXPECTED, indirect=True)
def test_a_machine_survives_its_file(machine: Machine) -> None:
    assert profile.from_document(json.loads(json.dumps(profile.document(machine)))) == machine


@pytest.mark.parametrize("machine", ["cxl-memory"], indirect=True)
def test_memory_without_cores_is_no_worker(machine: Machine) -> None:
    assert [node.id for node in machine.worker_nodes] == [0]
    assert machine.nodes[1].size_bytes == 256 * GIB


@pytest.mark.parametrize(
    ("machine", "ids"),
    [("two-sockets", [0, 1]), ("container-mems", [1]), ("no-memory-node", [0, 2])],
    indirect=["machine"],
)
def test_memory_that_may_be_used(machine: Machine, ids: list[int]) -> None:
    assert [node.id for node in machine.nodes if node.has_memory] == ids


@pytest.mark.parametrize("machine", ["container"], indirect=True)
def test_container_limits(machine: Machine) -> None:
    assert machine.cpu.cores == (2, 3, 4)
    assert machine.cpu.quota == 2.5
    assert machine.memory.limit_bytes == 16 * GIB
    # 6 GiB in use, of them 4 GiB of page cache that the kernel gives up.
    assert machine.memory.free_bytes == 14 * GIB


@pytest.mark.parametrize("machine", ["container-v1"], indirect=True)
def test_container_limits_of_version_1(machine: Machine) -> None:
    assert machine.cpu.quota == 4.0
    assert machine.memory.free_bytes == 6 * GIB


def _clocks(name: str, said: dict[int, int]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/{name}": str(n) for cpu, n in said.items()}


FAST, SLOW = range(4), range(4, 12)


@pytest.mark.parametrize(
    ("pairs", "name", "fast", "slow", "efficient"),
    [
        (False, "cpu_capacity", 1024, 620, tuple(SLOW)),
        (False, "cpufreq/cpuinfo_max_freq", 5_200_000, 3_900_000, tuple(SLOW)),
        (False, "cpufreq/cpuinfo_max_freq", 5_700_000, 5_200_000, ()),  # favoured cores
        (True, "cpufreq/cpuinfo_max_freq", 5_100_000, 3_300_000, ()),  # one design, packed densely
        (True, "cpu_capacity", 1024, 620, tuple(SLOW)),
    ],
)
def test_slower_cores_are_told_by_what_the_kernel_says_of_their_speed(
    tmp_path: Path, pairs: bool, name: str, fast: int, slow: int, efficient: tuple[int, ...]
) -> None:
    cores = tuple((core, core + 12) if pairs else (core,) for core in range(12))
    files = _clocks(name, {**dict.fromkeys(FAST, fast), **dict.fromkeys(SLOW, slow)})
    cpus = "0-23" if pairs else "0-11"
    cpu = probe(build(Tree((cores,), {0: (cpus, 64)}, cpus, files=files), tmp_path)).cpu
    assert cpu.efficient == efficient
    assert cpu.threads == (4 if efficient else 12)


def test_a_process_that_has_only_slow_cores_uses_them(tmp_path: Path) -> None:
    cpu = probe(build(replace(TREES["hybrid"], allowed="10-13"), tmp_path)).cpu
    assert (cpu.cores, cpu.threads) == ((10, 11, 12, 13), 4)


@pytest.mark.parametrize("machine", ["hybrid"], indirect=True)
def test_plans_count_on_the_fast_cores(machine: Machine) -> None:
    assert host_of(machine).threads == 8
    assert host_of(machine).notes == ()
    every = host_of(machine, threads=24)
    assert every.threads == 24 and "efficiency cores" in every.notes[0]
    assert every.rates.int8_ops == host_of(machine).rates.int8_ops


@pytest.mark.parametrize("machine", ["throttled"], indirect=True)
def test_memory_that_the_kernel_would_take_back(machine: Machine) -> None:
    assert machine.memory.limit_bytes == 12 * GIB
    assert machine.memory.free_bytes == 10 * GIB


@pytest.mark.parametrize("machine", ["two-sockets"], indirect=True)
def test_facts_of_a_server(machine: Machine) -> None:
    assert machine.cpu.logical_cpus == 128
    assert {"amx_tile", "amx_int8", "amx_bf16"} <= set(machine.cpu.flags)
    assert [(c.level, c.size_bytes, c.count) for c in machine.cpu.caches] == [
        (1, 48 << 10, 64),
        (3, 32 << 20, 2),
    ]
    assert machine.memory.total_bytes == 512 * GIB
    assert machine.memory.huge_pages == "madvise"
    assert machine.memory.huge_free_bytes == 6 << 20
    assert machine.nodes[1].free_bytes == 64 * GIB + (1 << 20)
    assert machine.system == "Linux 6.8.0"


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.cpu.model is None
    assert found.cpu.threads == 1
    assert found.memory.total_bytes == 0


def test_this_machine() -> None:
    found = probe()
    assert found.cpu.cores
    assert found.memory.total_bytes > 0
    assert profile.from_document(profile.document(found)) == found


def test_rates_are_those_of_the_teams_that_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setenv("KT_NUMA", "16")
    for name in ("KT_ISA", "KT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cpu = probe().cpu
    rates = Measured(cpu.isa[0], max(16, cpu.threads), 1e10, 1e12, 1e11, "2026-01-01")
    save(cpu, rates)
    assert probe().measured == rates
    monkeypatch.setenv("KT_THREADS", "1")
    monkeypatch.setenv("KT_NUMA", "off")
    assert probe().measured is None


def test_a_name_nobody_knows_is_asked_of_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpuinfo

    monkeypatch.setattr("ktcli.hardware.cpu.table", lambda text: {})
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: {"brand_raw": "Other CPU"})
    assert probe().cpu.model == "Other CPU"


def test_gpus(tmp_path: Path) -> None:
    text = (
        "0, NVIDIA GeForce RTX 4090, 24564, 23000, 4, 16, 8.9, 560.35.03\n"
        "1, NVIDIA H200, 143771, 143000, [N/A], 16, 9.0, 560.35.03, Disabled\n"
        "No devices were found\n"
    )
    (tmp_path / "nvidia-smi.csv").write_text(text)
    first, second = read_gpus(tmp_path).gpus
    assert (first.name, first.vram_bytes, first.capability) == (
        "NVIDIA GeForce RTX 4090",
        24564 << 20,
        "8.9",
    )
    assert first.link_bps == pytest.approx(31.5e9, rel=0.01)
    assert (second.link_bps, second.free_bytes) == (None, 143000 << 20)


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11"])
def test_cpu_lists(text: str) -> None:
    assert cpu_text(cpu_list(text)) == text


# --- files that say what no kernel writes ---------------------------------------------------------

HOSTILE = Tree(
    (((0,), (1,)),),
    {0: ("0", 8), 1: ("1", 8)},
    "0-1",
    mems="0-1",
    memory_gib=16,
    files={
        "proc/self/cgroup": "4:memory:/a\n2:cpu:/a\n0::/b",
        "sys/fs/cgroup/b/cpu.max": "200000 100000",
        "sys/fs/cgroup/b/memory.max": str(8 << 30),
        "sys/fs/cgroup/b/memory.current": "4096",
        "sys/fs/cgroup/b/memory.stat": "active_file 4096",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(8 << 30),
    },
)
NUMBERS = ("", "x", "-1", "²", "9" * 18, "9" * 4000, "9" * 5000, "0-1000000000")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:12])
def test_a_number_that_makes_no_sense_is_none(number: str, tmp_path: Path) -> None:
    root = build(HOSTILE, tmp_path)
    for path in [path for path in root.rglob("*") if path.is_file()]:
        said = path.read_text()
        path.write_text(re.sub("[0-9]+", number, said))
        machine = probe(root)
        assert profile.document(machine)
        for numa in (AUTO, OFF, Numa(2), Numa(16)):
            assert host_of(machine, numa=numa).threads >= 1, path
        path.write_text(said)


def test_thousands_of_nodes(tmp_path: Path) -> None:
    cores = tuple((core,) for core in range(100))
    nodes = {7 * i: (f"{i}" if i < 100 else "", 1) for i in range(1000)}
    machine = probe(build(Tree((cores,), nodes, "0-99"), tmp_path))
    assert len(machine.nodes) == 1000
    teams = host_of(machine).teams
    assert len(teams) == 64 and sum(team.threads for team in teams) == 100


def test_a_list_names_no_cpu_a_thousand_times() -> None:
    assert cpu_list("0-65535") == tuple(range(1 << 16))
    with pytest.raises(ValueError, match="higher than on any machine"):
        cpu_list("0-65535," * 1000)
