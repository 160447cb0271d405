"""What the planner makes of a machine: threads, memory and rates, on recorded trees."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hardware.trees import TREES, build

from ktcli.hardware.machine import Cpu, Gpu, Machine, Measured, Memory, Node
from ktcli.hardware.probe import probe
from ktcli.native import isa_rows
from ktcli.planner.cost import ROWS, assumed_rates
from ktcli.planner.host import Host, host_of
from ktcli.planner.memory import margin_bytes

GIB = 1 << 30

# tree: threads, GiB at most, row of kernels
EXPECTED = {
    "desktop": (8, 64, "avx2"),
    "two-sockets": (64, 512, "amx"),
    "snc-4": (48, 256, "amx"),
    "snc-8": (64, 256, "avx2"),
    "epyc-nps4": (64, 384, "avx2"),
    "cxl-memory": (16, 128, "avx2"),
    "odd-node-ids": (16, 128, "avx2"),
    "offline-cores": (6, 64, "avx2"),
    "smt-off": (4, 64, "avx2"),
    "container": (2, 16, "avx2"),
    "container-v1": (4, 8, "avx2"),
    "bare": (2, 4, "avx2"),
}


_probed: dict[str, Machine] = {}


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """Each tree is written and read once."""
    if request.param not in _probed:
        _probed[request.param] = probe(build(TREES[request.param], tmp_path))
    return _probed[request.param]


@pytest.mark.parametrize(
    ("machine", "expected"), EXPECTED.items(), indirect=["machine"], ids=list(EXPECTED)
)
def test_recorded_machines(machine: Machine, expected: tuple[int, int, str]):
    host = host_of(machine)
    threads, gib, isa = expected
    assert host.threads == threads
    assert host.total_bytes == gib * GIB
    assert host.isa == isa  # avx512f with vnni alone is not enough for the avx512 row
    assert 0 < host.available_bytes <= host.total_bytes


@pytest.mark.parametrize("machine", TREES, indirect=True)
def test_more_threads_than_cores_do_not_make_a_machine_faster(machine: Machine):
    usual, more = host_of(machine), host_of(machine, threads=4 * machine.cpu.threads)
    assert more.rates.read_bps <= usual.rates.read_bps
    assert more.rates.int8_ops <= usual.rates.int8_ops
    assert any("slower, not faster" in note for note in more.notes)


@pytest.mark.parametrize("machine", TREES, indirect=True)
def test_fewer_threads_are_never_faster(machine: Machine):
    rates = [host_of(machine, threads=n).rates for n in range(1, machine.cpu.threads + 1)]
    for fewer, more in pairwise(rates):
        assert fewer.read_bps <= more.read_bps
        assert fewer.int8_ops <= more.int8_ops


# --- measured rates ---------------------------------------------------------------------------------

MEASURED = Measured("avx512", 8, read_bps=60e9, int8_ops=8e12, bf16_ops=2e12, date="2026-01-02")


def eight_cores(**changes: object) -> Machine:
    plain = Machine(
        name="eight",
        system="",
        cpu=Cpu("Some CPU", ("avx512", "avx2", "portable"), (), 1, 8, 8, tuple(range(8))),
        memory=Memory(64 * GIB, 60 * GIB),
        nodes=(Node(0, tuple(range(8)), 64 * GIB, 60 * GIB),),
        measured=MEASURED,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_measured_rates_are_taken_as_they_are():
    rates = host_of(eight_cores()).rates
    assert (rates.read_bps, rates.int8_ops, rates.bf16_ops) == (60e9, 8e12, 2e12)
    assert rates.measured
    assert "2026-01-02" in rates.basis


def test_half_the_threads_have_half_the_arithmetic_but_most_of_the_bandwidth():
    rates = host_of(eight_cores(), threads=4).rates
    assert rates.int8_ops == 4e12
    assert rates.read_bps == 60e9  # four cores pull 80 GB/s if the memory gives it
    assert host_of(eight_cores(), threads=1).rates.read_bps == 20e9
    assert "scaled" in rates.basis


def test_rates_of_another_row_are_not_this_rows():
    rates = host_of(eight_cores(), isa="avx2").rates
    assert not rates.measured
    assert "assumed" in rates.basis


def test_a_row_this_version_does_not_have_is_not_planned_with():
    cpu = replace(eight_cores().cpu, isa=("some-later-row", "avx512", "portable"))
    assert host_of(eight_cores(cpu=cpu)).isa == "avx512"


def test_wider_rows_are_assumed_faster():
    rows = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
    rates = [assumed_rates(row, (8,)) for row in rows]
    assert [r.int8_ops for r in rates] == sorted(r.int8_ops for r in rates)
    assert [r.bf16_ops for r in rates] == sorted(r.bf16_ops for r in rates)


# --- memory and notes -------------------------------------------------------------------------------


def test_memory_without_cores_is_not_counted_and_said_so():
    nodes = (Node(0, (0, 1), 64 * GIB, 60 * GIB), Node(1, (), 200 * GIB, 200 * GIB))
    host = host_of(eight_cores(nodes=nodes, memory=Memory(264 * GIB, 260 * GIB)))
    assert host.available_bytes == 60 * GIB
    assert any("200.0 GiB of memory on nodes without cores" in note for note in host.notes)


def test_a_container_limit_counts():
    host = host_of(eight_cores(memory=Memory(64 * GIB, 60 * GIB, 16 * GIB, 4 * GIB)))
    assert (host.total_bytes, host.available_bytes) == (16 * GIB, 12 * GIB)


def test_every_gpu_is_named_with_its_memory():
    gpus = (Gpu(0, "GPU A", 24 * GIB, 20 * GIB), Gpu(1, "GPU B", 48 * GIB, 48 * GIB))
    notes = host_of(eight_cores(gpus=gpus)).notes
    assert ["GPU A with 24.0 GiB" in notes[0], "GPU B with 48.0 GiB" in notes[1]] == [True, True]


def test_several_nodes_count_as_one_and_say_so():
    nodes = tuple(Node(i, tuple(range(4 * i, 4 * i + 4)), 32 * GIB, 30 * GIB) for i in (0, 1))
    host = host_of(eight_cores(nodes=nodes, measured=None))
    assert host.rates.read_bps == assumed_rates("avx512", (4,)).read_bps
    assert any("2 NUMA nodes" in note for note in host.notes)


@pytest.mark.parametrize(("gib", "expected"), [(1, 0.03), (100, 3), (2000, 4)])
def test_margin_grows_with_the_machine_to_a_limit(gib: int, expected: float):
    assert margin_bytes(gib * GIB) / GIB == pytest.approx(expected, rel=0.01)


def test_the_same_machine_gives_the_same_host():
    assert host_of(eight_cores()) == host_of(eight_cores())
    assert isinstance(host_of(eight_cores()), Host)


def test_the_planner_knows_every_row_of_kernels_in_the_same_order():
    built = [row.name for row in isa_rows()]
    assert [name for name in ROWS if name in built] == built
