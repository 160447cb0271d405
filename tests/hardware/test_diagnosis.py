"""What `kt doctor` finds wrong with a machine, and that it stays silent about a good one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktcli.hardware.amx import Check, Verdict
from ktcli.hardware.diagnosis import HostSetting, Kernel, Level, diagnose, explain_rows
from ktcli.hardware.machine import Cpu, Disk, Gpu, Machine, Memory, Node

GIB = 1 << 30
CORES = tuple(range(8))
GOOD = Machine(
    name="good",
    system="Linux 6.8",
    cpu=Cpu("Some CPU", ("avx512", "avx2", "portable"), ("avx2", "avx512f"), 1, 8, 16, CORES),
    memory=Memory(64 * GIB, 60 * GIB, huge_pages="madvise"),
    nodes=(Node(0, CORES, 64 * GIB, 60 * GIB),),
    disk=Disk("/home/kt", 1000 * GIB, 500 * GIB, rotational=False),
)
SETTING = HostSetting("Linux x86_64", "", None, None, False, False, "/home/kt", "")
ROWS = (
    ("amx", False, "amx_tile"),
    ("avx512", True, ""),
    ("avx2", True, ""),
    ("portable", True, ""),
)
GPU = Gpu(0, "NVIDIA X", 24 * GIB, 23 * GIB)


def cpu(**change: object) -> Machine:
    return replace(GOOD, cpu=replace(GOOD.cpu, **change))  # type: ignore[arg-type]


def memory(**change: object) -> Machine:
    return replace(GOOD, memory=replace(GOOD.memory, **change))  # type: ignore[arg-type]


def disk(**change: object) -> Machine:
    assert GOOD.disk is not None
    return replace(GOOD, disk=replace(GOOD.disk, **change))  # type: ignore[arg-type]


def cpus_on_two_nodes(second: Node) -> Machine:
    return replace(GOOD, nodes=(Node(0, CORES[:4], 32 * GIB, 30 * GIB), second))


def test_a_good_machine_has_no_problems() -> None:
    assert diagnose(GOOD, explain_rows(ROWS, None), SETTING) == ()


# what is different → (machine, setting, level, words of the sentence)
CASES: dict[str, tuple[Machine, HostSetting, Level, str]] = {
    "another system": (GOOD, replace(SETTING, system="Darwin arm64"), Level.ERROR, "this is Darwin arm64"),
    "no library": (GOOD, replace(SETTING, native_error="it is not built"), Level.ERROR, "not built"),
    "unknown row": (GOOD, replace(SETTING, forced_isa="sse"), Level.ERROR, "avx512, avx2, portable"),
    "row the CPU lacks": (GOOD, replace(SETTING, forced_isa="amx"), Level.ERROR, "'amx'"),
    "home": (GOOD, replace(SETTING, home_error="it is a file"), Level.ERROR, "it is a file"),
    "read-only home": (GOOD, replace(SETTING, home_warning="read-only"), Level.WARNING, "read-only"),
    "too many threads": (GOOD, replace(SETTING, forced_threads=16), Level.ERROR, "KT_THREADS is 16"),
    "quota": (cpu(quota=2.5), SETTING, Level.WARNING, "2.5 CPUs"),
    "cpuset": (cpu(cores=(0, 1)), SETTING, Level.NOTE, "2 of 8 physical cores"),
    "two kinds of cores": (cpu(efficient=(6, 7)), SETTING, Level.NOTE, "2 efficiency cores are not used"),
    "little memory": (memory(available_bytes=GIB), SETTING, Level.WARNING, "only 1.0 GiB"),
    "container": (memory(limit_bytes=8 * GIB, used_bytes=0), SETTING, Level.NOTE, "allows 8.0 GiB"),
    "no huge pages": (memory(huge_pages="never"), SETTING, Level.WARNING, "huge pages"),
    "memory node": (
        replace(GOOD, nodes=(*GOOD.nodes, Node(1, (), GIB, GIB))), SETTING, Level.NOTE, "node 1",
    ),
    "cores without memory": (
        cpus_on_two_nodes(Node(1, CORES[4:], 0, 0)), SETTING, Level.WARNING, "node 1 has no memory: its 4",
    ),
    "memory not allowed": (
        cpus_on_two_nodes(Node(1, CORES[4:], 32 * GIB, GIB, allowed=False)), SETTING, Level.WARNING,
        "may not use: its 4 cores read the memory of node 0",
    ),
    "foreign memory": (
        replace(GOOD, nodes=(*GOOD.nodes, Node(1, (), GIB, GIB, allowed=False))), SETTING, Level.NOTE,
        "this process may not use it",
    ),
    "no torch": (replace(GOOD, gpus=(GPU,)), SETTING, Level.WARNING, "PyTorch is not installed"),
    "silent driver": (GOOD, replace(SETTING, nvidia_driver=True), Level.WARNING, "nvidia-smi"),
    "hidden devices": (
        GOOD, replace(SETTING, nvidia_driver=True, gpus_hidden=" among those in it"), Level.WARNING,
        "finds a GPU among those in it",
    ),
    "lost GPU": (
        replace(GOOD, gpus_unread=("GPU0000:25:00.0: GPU is lost.",)), SETTING, Level.WARNING, "GPU is lost",
    ),
    "full disk": (disk(free_bytes=GIB), SETTING, Level.WARNING, "only 1.0 GiB is free on the disk"),
    "spinning disk": (disk(rotational=True), SETTING, Level.NOTE, "hard disk"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_one_difference_is_one_problem(kind: str) -> None:
    machine, setting, level, words = CASES[kind]
    kernels = () if setting.native_error else explain_rows(ROWS, setting.forced_isa)
    (problem,) = diagnose(machine, kernels, setting)
    assert problem.level is level
    assert words in problem.message
    assert problem.fix or level is Level.NOTE or kind == "another system"


@pytest.mark.parametrize(
    ("used", "fix", "warned"), [(False, "do this", True), (False, "", False), (True, "", False)]
)
def test_tiles_that_could_be_used_are_a_warning(used: bool, fix: str, warned: bool) -> None:
    check = Check(True, "seen")
    tiles = Verdict(check, check, check, used, "the hypervisor hides it", fix)
    problems = diagnose(GOOD, explain_rows(ROWS, None), SETTING, tiles)
    assert [(p.level, p.message, p.fix) for p in problems] == [
        (Level.WARNING, "AMX is not used: the hypervisor hides it", "do this")
    ] * warned


def test_a_gpu_with_torch_is_fine() -> None:
    machine = replace(GOOD, gpus=(GPU,))
    assert diagnose(machine, explain_rows(ROWS, None), replace(SETTING, torch=True)) == ()


def test_worst_first() -> None:
    setting = replace(SETTING, forced_isa="sse")
    levels = [
        p.level for p in diagnose(cpu(cores=(0,), quota=0.5), explain_rows(ROWS, "sse"), setting)
    ]
    assert levels == sorted(levels, reverse=True)


def test_only_portable() -> None:
    rows = (("avx2", False, "avx2"), ("portable", True, ""))
    (problem,) = diagnose(GOOD, explain_rows(rows, None), SETTING)
    assert "no AVX2" in problem.message


def test_the_rows_say_which_is_used_and_why() -> None:
    assert [k.used for k in explain_rows(ROWS, None)] == [False, True, False, False]
    forced = explain_rows(ROWS, "avx2")
    assert forced[2] == Kernel("avx2", True, True, "KT_ISA asks for it")
    assert not any(kernel.used for kernel in explain_rows(ROWS, "nonsense"))
