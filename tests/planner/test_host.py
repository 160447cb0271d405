"""What the planner makes of a machine: threads, memory and rates, on recorded trees."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hardware.trees import TREES, build

from ktcli.errors import UsageError
from ktcli.hardware.machine import Cpu, Gpu, Machine, Measured, Memory, Node
from ktcli.hardware.numa import OFF, Numa
from ktcli.hardware.probe import probe
from ktcli.native import isa_rows
from ktcli.planner.cost import ROWS, TILE_GAIN, assumed_rates, assumed_read_bps
from ktcli.planner.host import Host, host_of
from ktcli.planner.memory import margin_bytes
from ktcli.planner.spec import Unit

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
    "container-mems": (16, 128, "avx2"),
    "no-memory-node": (16, 64, "avx2"),
    "unequal-nodes": (11, 64, "avx2"),
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
def test_more_threads_than_cores_are_refused(machine: Machine):
    cores = len(machine.cpu.cores)
    assert host_of(machine, threads=cores).threads == cores
    with pytest.raises(UsageError, match=f"only {cores} physical core"):
        host_of(machine, threads=cores + 1)


@pytest.mark.parametrize("machine", ["container", "container-v1"], indirect=True)
def test_more_threads_than_the_time_allowed_do_not_make_a_machine_faster(machine: Machine):
    usual, more = host_of(machine), host_of(machine, threads=len(machine.cpu.cores))
    assert more.threads > usual.threads
    assert more.rates.read_bps <= usual.rates.read_bps
    assert more.rates.int8_ops <= usual.rates.int8_ops
    assert any("slower, not faster" in note for note in more.notes)


@pytest.mark.parametrize("machine", TREES, indirect=True)
def test_more_teams_than_cores_do_not_make_a_machine_faster(machine: Machine):
    usual, more = host_of(machine, numa=OFF), host_of(machine, numa=Numa(16))
    assert more.rates.int8_ops <= usual.rates.int8_ops
    assert more.threads == max(16, usual.threads)
    assert any("for testing" in note for note in more.notes) == (len(machine.cpu.cores) < 16)


@pytest.mark.parametrize("machine", TREES, indirect=True)
def test_fewer_threads_are_never_faster(machine: Machine):
    rates = [host_of(machine, threads=n).rates for n in range(1, machine.cpu.threads + 1)]
    rates += [host_of(machine).rates]
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


def test_rates_of_otherwise_bound_memory_are_not_these():
    nodes = (Node(0, (0, 1, 2, 3), 32 * GIB, 24 * GIB), Node(1, (4, 5, 6, 7), 32 * GIB, 24 * GIB))
    found = eight_cores(nodes=nodes)
    assert not host_of(found).rates.measured  # measured with memory anywhere
    assert host_of(found, numa=OFF).rates.measured
    both = eight_cores(nodes=nodes, measured=replace(MEASURED, nodes=2))
    assert host_of(both).rates.read_bps == MEASURED.read_bps
    assert host_of(both, numa=Numa(4)).rates.measured  # each node split, all memory bound
    assert not host_of(both, numa=OFF).rates.measured


def test_a_row_this_version_does_not_have_is_not_planned_with():
    cpu = replace(eight_cores().cpu, isa=("some-later-row", "avx512", "portable"))
    assert host_of(eight_cores(cpu=cpu)).isa == "avx512"


def test_wider_rows_are_assumed_faster():
    rows = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
    rates = [assumed_rates(row, 8, 1e11) for row in rows]
    assert [r.int8_ops for r in rates] == sorted(r.int8_ops for r in rates)
    assert [r.bf16_ops for r in rates] == sorted(r.bf16_ops for r in rates)


def test_a_tile_multiplies_as_the_instruction_tables_say():
    # TDPBSSD: 16 x 16 outputs of 64 products in 16 cycles; TDPBF16PS: of 32 products.
    for ops, products in ((ROWS["amx"].int8_ops, 64), (ROWS["amx"].bf16_ops, 32)):
        assert ops == 2 * 16 * 16 * products // 16


def test_tiles_help_prefill_and_nothing_else():
    tiles, vectors = (assumed_rates(row, 32, 1e11) for row in ("amx", "avx512bf16"))
    for unit in Unit:
        assert tiles.reached(unit, 1) == pytest.approx(vectors.reached(unit, 1))
    for unit in (Unit.INT8, Unit.BF16):
        assert 1 < tiles.reached(unit, 512) / vectors.reached(unit, 512) < TILE_GAIN
    assert tiles.reached(Unit.ATTENTION, 512) == pytest.approx(vectors.reached(Unit.ATTENTION, 512))


def test_tiles_are_assumed_to_reach_what_others_publish():
    rates = assumed_rates("amx", 32, 1e11)
    assert rates.reached(Unit.INT8, 512) == pytest.approx(35e12, rel=0.1)
    assert rates.reached(Unit.BF16, 512) == pytest.approx(21e12, rel=0.1)


def test_what_is_assumed_of_tiles_is_said():
    cpu = replace(eight_cores().cpu, isa=("amx", "avx512"))
    measured = replace(MEASURED, isa="amx")
    for host in (
        host_of(eight_cores(cpu=cpu, measured=measured)),
        host_of(eight_cores(cpu=cpu, measured=None)),
    ):
        assert (host.isa, host.rates.tiles) == ("amx", True)
        assert "prefill with tiles assumed" in host.rates.basis
    assert "tiles" not in host_of(eight_cores()).rates.basis


# --- memory and notes -------------------------------------------------------------------------------


def test_memory_without_cores_is_not_counted_and_said_so():
    nodes = (Node(0, (0, 1), 64 * GIB, 60 * GIB), Node(1, (), 200 * GIB, 200 * GIB))
    host = host_of(eight_cores(nodes=nodes, memory=Memory(264 * GIB, 260 * GIB)))
    assert host.available_bytes == 60 * GIB
    assert any("200.0 GiB of memory on node 1 without cores" in note for note in host.notes)


def test_a_container_limit_counts():
    host = host_of(eight_cores(memory=Memory(64 * GIB, 60 * GIB, 16 * GIB, 4 * GIB)))
    assert (host.total_bytes, host.available_bytes) == (16 * GIB, 12 * GIB)


def test_every_gpu_is_named_with_its_memory():
    gpus = (Gpu(0, "GPU A", 24 * GIB, 20 * GIB), Gpu(1, "GPU B", 48 * GIB, 48 * GIB))
    notes = host_of(eight_cores(gpus=gpus)).notes
    assert ["GPU A (24.0 GiB)" in notes[0], "GPU B (48.0 GiB)" in notes[1]] == [True, True]


@pytest.mark.parametrize("machine", ["container-mems"], indirect=True)
def test_memory_the_cpuset_forbids_is_not_counted_and_said_so(machine: Machine):
    host = host_of(machine)
    assert host.total_bytes == 128 * GIB
    assert any("128.0 GiB of memory on node 0 which this process may not" in n for n in host.notes)


# --- several nodes ----------------------------------------------------------------------------------


def two_nodes() -> Machine:
    nodes = tuple(Node(i, tuple(range(4 * i, 4 * i + 4)), 32 * GIB, 30 * GIB) for i in (0, 1))
    return eight_cores(nodes=nodes, measured=None)


def test_bound_nodes_add_up():
    host, off = host_of(two_nodes()), host_of(two_nodes(), numa=OFF)
    assert host.rates.read_bps == 2 * assumed_read_bps(4)
    assert off.rates.read_bps == assumed_read_bps(8, nodes=2) == assumed_read_bps(4)
    assert host.rates.int8_ops == off.rates.int8_ops
    assert [team.memory for team in host.teams] == [(0,), (1,)]
    assert [node.id for node in host.nodes] == [0, 1]
    assert host.notes == ()


def test_nothing_is_bound_with_numa_off_and_the_plan_says_what_it_costs():
    host = host_of(two_nodes(), numa=OFF)
    assert host.nodes == ()
    assert any("--numa off on 2 nodes" in note for note in host.notes)


def test_teams_that_share_a_memory_share_its_bandwidth():
    assert host_of(two_nodes(), numa=Numa(8)).rates == host_of(two_nodes()).rates
    assert host_of(two_nodes(), numa=Numa(1)).rates == host_of(two_nodes(), numa=OFF).rates


def test_one_of_two_nodes():
    host = host_of(two_nodes(), numa=Numa(nodes=(1,)))
    assert (host.threads, host.total_bytes, host.available_bytes) == (4, 32 * GIB, 30 * GIB)
    assert host.rates.read_bps == assumed_read_bps(4)
    assert host.notes == (
        "the plan does not count 32.0 GiB of memory on node 0 that --numa nodes=1 leaves out",
    )


@pytest.mark.parametrize(("gib", "expected"), [(1, 0.03), (100, 3), (2000, 4)])
def test_margin_grows_with_the_machine_to_a_limit(gib: int, expected: float):
    assert margin_bytes(gib * GIB) / GIB == pytest.approx(expected, rel=0.01)


def test_the_same_machine_gives_the_same_host():
    assert host_of(eight_cores()) == host_of(eight_cores())
    assert isinstance(host_of(eight_cores()), Host)


def test_the_planner_knows_every_row_of_kernels_in_the_same_order():
    built = [row.name for row in isa_rows()]
    assert [name for name in ROWS if name in built] == built
