"""Several nodes give what one gives: weights cut between pretend nodes, loaded from one pack.

Integer formats multiply the same 8-bit activations; only the order of the last sum differs, which a few
layers turn into about 1e-6 of a logit. A node that quantised for itself would be off by 1e-3.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from loading import load_engine, plan_for
from reference import case_named, write_checkpoint
from timelines import logits_of
from waits import until

from ktcli.engine import CpuEngine
from ktcli.engine import cpu as engine_module
from ktcli.engine.loader import PackSource
from ktcli.errors import BadPack, NotEnoughMemory
from ktcli.hardware.machine import Memory, Node
from ktcli.hardware.numa import AUTO, Numa
from ktcli.hardware.probe import probe
from ktcli.hardware.team import NodeTeam
from ktcli.models import build
from ktcli.native import Pool
from ktcli.planner.memory import drops_cached
from ktcli.weights.pack import Pack

IDS = np.random.default_rng(4).integers(0, 99, 70).tolist()
NODES = (2, 3, 4, 8)


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts 200 wide: three whole units of 64 columns and a part of one."""
    case = case_named(request.param)
    # With this seed no router is so near a tie that the order of a sum decides it.
    wide = replace(case, values={**case.values, "moe_intermediate_size": 200}, seed=3)
    return write_checkpoint(wide, tmp_path_factory.mktemp(case.name) / "checkpoint")


@pytest.fixture(scope="module", params=["bf16", "int8", "int4", "int4-g32"])
def pack(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    dense = "bf16" if request.param == "bf16" else "int8"
    out = tmp_path_factory.mktemp("packs") / request.param
    return convert_checkpoint(checkpoint, out, experts=request.param, dense=dense)


def logits(pack: Path, numa: Numa) -> np.ndarray:
    """Of a prompt, and of some tokens after it one by one."""
    engine = load_engine(pack, context=100, threads=1, numa=numa, all_logits=True)
    assert len(engine.pool.node_threads) == (numa.teams or 1)
    session = engine.session()
    rows = [logits_of(session, IDS[:60])]
    rows += [session.feed([token]).values[None].copy() for token in IDS[60:]]
    return np.concatenate(rows)


def agree(pack: Path, bound: float) -> None:
    """Logits with several nodes are those with one, within `bound` of their standard deviation."""
    one = logits(pack, Numa(1))
    for count in NODES:
        off = np.abs(logits(pack, Numa(count)) - one).max(axis=1) / one.std()
        # A router that changes its mind by such a difference moves a row; that is no error of a node.
        assert (off <= bound).mean() >= 0.9, f"{count} nodes: {np.sort(off)[-8:]}"


@pytest.mark.each_once
def test_nodes_agree(pack: Path) -> None:
    agree(pack, 2e-2 if pack.name == "bf16" else 1e-4)  # bf16: hidden values are rounded to it


@pytest.mark.each_once
@pytest.mark.parametrize("experts", ["int4-g128", "int4-row-had"])
def test_nodes_agree_on_units_wider_than_a_step(
    checkpoint: Path, tmp_path: Path, experts: str
) -> None:
    agree(convert_checkpoint(checkpoint, tmp_path / "pack", experts=experts, dense="int8"), 1e-4)


def test_memory_lies_where_its_node_is() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel does not say where memory lies")
    pool = Pool(2, teams=(NodeTeam(1, memory=(0,)), NodeTeam(1)))
    bound, free = pool.arena(5 << 20, 0), pool.arena(5 << 20, 1)
    if bound.refused:
        pytest.skip(f"this system binds no memory: {bound.refused}")
    assert "prefer:0" in policy(bound.address) and "default" in policy(free.address)


def policy(address: int) -> str:
    """The line of the mapping that holds an address."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    starts = [(int(line.split()[0], 16), line) for line in lines]
    return max(pair for pair in starts if pair[0] <= address)[1]


@pytest.mark.parametrize("numa", [Numa(1), Numa(3)], ids=str)
def test_progress_grows_to_the_whole(pack: Path, numa: Numa) -> None:
    seen: list[tuple[int, int]] = []
    engine = load_engine(
        pack, context=64, threads=1, numa=numa, progress=lambda *told: seen.append(told)
    )
    assert len(seen) == len(engine.model.tensors)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {seen[-1][0]}


def test_every_byte_of_a_pack_is_read_once(pack: Path) -> None:
    size = sum(path.stat().st_size for path in pack.glob("*.safetensors"))
    beside = 200_000  # headers, the manifest, the config, what /proc and /sys say
    for _ in range(5):  # until no C test beside this one ends meanwhile
        before = bytes_read()
        load_engine(pack, context=64, threads=1, numa=Numa(3))
        read = bytes_read() - before
        if read <= size + beside:
            break
    assert size <= read <= size + beside


def bytes_read() -> int:
    """Bytes this process has asked the system for so far, and those of each child that it has waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


# --- too little memory on a node ------------------------------------------------------------------


def test_a_full_node_is_named_before_anything_is_loaded(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    nodes = (Node(0, (0,), 8 * gib, 4 * gib), Node(1, (1,), 8 * gib, 1000))
    machine = replace(
        probe(gpus=False), memory=Memory(16 * gib, 5 * gib), nodes=nodes, measured=None
    )
    machine = replace(machine, cpu=replace(machine.cpu, cores=(0, 1), quota=None))
    monkeypatch.setattr("ktcli.assembly.host.probe", lambda **_: machine)
    monkeypatch.setattr("ktcli.assembly.planner.planned_team", lambda *_: pytest.fail("started"))
    with pytest.raises(NotEnoughMemory, match="NUMA node 1, but only 1000 B") as caught:
        load_engine(pack, context=100, numa=AUTO)
    assert "--numa off" in caught.value.hint


@pytest.mark.parametrize("numa", [Numa(1), Numa(2)], ids=str)
def test_a_file_that_shrinks_while_it_is_loaded(
    pack: Path, numa: Numa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(pack, tmp_path / "pack")
    real = engine_module.load

    def shrink(*given: object, **named: object) -> object:
        for path in copy.glob("layer-*.safetensors"):
            os.truncate(path, path.stat().st_size // 2)
        return real(*given, **named)

    monkeypatch.setattr(engine_module, "load", shrink)
    with pytest.raises(BadPack, match=r"layer-00000.* the file ends at offset"):
        load_engine(copy, context=64, threads=1, numa=numa)


# --- the page cache -------------------------------------------------------------------------------


def test_cached_pages_go_only_where_there_is_no_room() -> None:
    assert not drops_cached(100, 120, 220)
    assert drops_cached(100, 120, 219)


@pytest.mark.parametrize("numa", [Numa(1), Numa(2)], ids=str)
@pytest.mark.parametrize("room", ["enough", "scarce"])
def test_cached_pages_after_a_load(pack: Path, room: str, numa: Numa) -> None:
    files = sorted(pack.glob("layer-*.safetensors"))
    opened, teams = Pack.open(pack), tuple(NodeTeam(1) for _ in range(numa.teams or 1))
    pool = Pool(len(teams), teams=teams)
    plan = plan_for(build(opened.config), pool, opened.recipe, 64)
    have = plan.need_bytes + opened.size_bytes - (room == "scarce")
    plan = replace(plan, host=replace(plan.host, available_bytes=have))
    for path in files:
        path.read_bytes()
    os.sync()  # pages that are not written yet stay, whatever is advised
    before = sum(map(cached_bytes, files))
    if not before:
        pytest.skip("this file system keeps nothing in the page cache")
    source = PackSource.planned(opened, pool, plan)
    CpuEngine(build(opened.config), source, pool, plan)
    after = sum(map(cached_bytes, files))
    assert after >= before if room == "enough" else after <= before // 4


def cached_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = path.stat().st_size
    with path.open("rb") as file:
        args = (None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        address = libc.mmap(*(ctypes.c_size_t(a or 0) for a in args))
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        done = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), seen)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    assert done == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in seen) * mmap.PAGESIZE


# --- a system that refuses, a process that dies ---------------------------------------------------

# Forbids pinning and binding, as some containers do, and then runs a command.
FORBIDDEN = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def rule(code, yes, no, k): return struct.pack("HBBI", code, yes, no, k)
rules = b"".join((rule(0x20, 0, 0, 0),                      # the system call's number
                  rule(0x15, 1, 0, 237), rule(0x15, 0, 1, 203),     # mbind, sched_setaffinity
                  rule(0x06, 0, 0, 0x00050001), rule(0x06, 0, 0, 0x7FFF0000)))  # EPERM, allowed
buffer = ctypes.create_string_buffer(rules)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 5, ctypes.addressof(buffer)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
from ktcli.main import main
sys.exit(main(sys.argv[1:]))
"""
COMMANDS = {
    "chat": ("chat", "kt-mini", "hello"),
    "kernel": ("bench", "kernel", "--shape", "64,64,4,2", "--work", "decode", "--runs", "1"),
}


@pytest.mark.parametrize("name", ["chat", pytest.param("kernel", marks=pytest.mark.thorough)])
def test_a_container_that_forbids_binding_is_warned_of_once(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "KT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", FORBIDDEN, *COMMANDS[name], "--numa", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 77:
        pytest.skip("this system allows no seccomp filter")
    assert done.returncode == 0 and done.stdout, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning: the system" in line]
    assert len(warnings) == 1 and "pin threads or to bind memory" in warnings[0]
    assert "Operation not permitted" in warnings[0]


LOADS = """
import sys
from pathlib import Path
from benchmarks.loading import load_pack
from ktcli.assembly.request import Wanted
from ktcli.hardware.numa import AUTO, Numa
from ktcli.hardware.probe import probe
print("ready", flush=True)
while True:
    load_pack(Path(sys.argv[1]), Wanted(context=100, threads=1, numa=Numa(2)))
"""


@pytest.mark.thorough
def test_a_killed_load_leaves_nothing(pack: Path, tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    scratch.mkdir()
    environment = {**os.environ, "KT_HOME": str(home), "TMPDIR": str(scratch)}
    before, shared = contents(pack), contents(Path("/dev/shm"))
    for i in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", LOADS, str(pack)], stdout=subprocess.PIPE, env=environment
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(0.003 + 0.017 * i)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    assert contents(pack) == before and contents(home) == contents(scratch) == set()
    until(lambda: contents(Path("/dev/shm")) <= shared)  # what other tests have there goes away


def contents(folder: Path) -> set[tuple[str, int]]:
    """The files of this user in a folder, each with its size; others come and go where all may write."""
    found = set[tuple[str, int]]()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                found.add((str(path), status.st_size))
    return found


def test_an_array_keeps_its_memory() -> None:
    array = Pool(1).arena(5 << 20).bytes
    array[:] = 7
    others = [Pool(1).arena(5 << 20).bytes for _ in range(3)]
    for other in others:
        other[:] = 1
    assert (array == 7).all()
