"""Settings of the system: what is read below a root, and the finding that follows, with its repair and its gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hardware.trees import TREES, build

from ktcli.hardware.diagnosis import HostSetting, Level, Problem, diagnose, explain_rows
from ktcli.hardware.probe import probe
from ktcli.hardware.tuning import Tuning, read_tuning

SETTING = HostSetting("Linux x86_64", "", None, None, False, False, "/home/kt", "")
ROWS = explain_rows((("avx2", True, ""), ("portable", True, "")), None)
CLOCK = "sys/devices/system/cpu/cpu0/cpufreq"
MODULE = "sys/devices/system/edac/mc/mc0/dimm"


def found(name: str, root: Path, files: dict[str, str], **changes: object) -> tuple[Problem, ...]:
    """The findings about a machine of the table with some further files."""
    tree = replace(TREES[name], **changes)  # type: ignore[arg-type]
    build(replace(tree, files={**tree.files, **files}), root)
    return diagnose(probe(root), ROWS, SETTING, None, read_tuning(root))


def clock(governor: str, driver: str) -> dict[str, str]:
    return {
        f"{CLOCK}/scaling_governor": governor,
        f"{CLOCK}/scaling_driver": driver,
        f"{CLOCK}/cpuinfo_min_freq": "1000000",
        f"{CLOCK}/cpuinfo_max_freq": "4000000",
    }


def modules(*channels: int, size: int = 16384) -> dict[str, str]:
    files = {}
    for i, channel in enumerate(channels):
        files[f"{MODULE}{i}/dimm_location"] = f"channel {channel} slot {i} "
        files[f"{MODULE}{i}/size"] = str(size)
    return files


# what is different -> (machine, files, words of the sentence, of the repair, of the gain)
CASES: dict[str, tuple[str, dict[str, str], str, str, str]] = {
    "governor": ("desktop", clock("powersave", "acpi-cpufreq"), "governor is powersave", "cpupower", "4.0 times"),
    "one channel": ("desktop", modules(0, 0), "on one channel", "dmidecode", "twice"),
    "overcommit": (
        "desktop",
        {"proc/sys/vm/overcommit_memory": "2",
         "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"
                         "CommitLimit: 20971520 kB\nCommitted_AS: 10485760 kB"},
        "allows only 10.0 GiB", "sysctl vm.overcommit_memory=0", "22.0 GiB more",
    ),
    "balancing": (
        "odd-node-ids", {"proc/sys/kernel/numa_balancing": "1"},
        "moves memory between nodes", "sysctl kernel.numa_balancing=0", "steadier",
    ),
    "huge pages": (
        "desktop", {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        "huge pages are switched off", "echo madvise", "faster reading of prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_setting_that_costs_is_a_finding(kind: str, tmp_path: Path) -> None:
    name, files, words, fix, gain = CASES[kind]
    (problem,) = found(name, tmp_path, files)
    assert problem.level is Level.WARNING and 0 < problem.loss < 1
    assert words in problem.message and fix in problem.fix and gain in problem.gain


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("desktop", {}),
        ("odd-node-ids", {"proc/sys/kernel/numa_balancing": "0"}),
        ("desktop", {"proc/sys/kernel/numa_balancing": "1"}),
        ("desktop", clock("powersave", "intel_pstate")),
        ("desktop", clock("performance", "acpi-cpufreq")),
        ("desktop", modules(0, 1)),
        ("desktop", modules(0, size=0)),
        ("desktop", {"proc/sys/vm/overcommit_memory": "2"}),
        ("desktop", {f"{CLOCK}/scaling_governor": "\x00" * 99, f"{MODULE}0/size": "many"}),
    ],
)
def test_what_costs_nothing_or_is_not_known_is_not_mentioned(
    name: str, files: dict[str, str], tmp_path: Path
) -> None:
    assert found(name, tmp_path, files) == ()


def test_a_container_of_hyperthreads(tmp_path: Path) -> None:
    """Five CPUs that are three cores, 2.5 CPUs of time, and an eighth of the memory: the costliest first."""
    problems = found("container", tmp_path, {})
    warnings = [each for each in problems if each.level is Level.WARNING]
    assert "the 5 CPUs of this process are only 3 cores: 2 are" in warnings[0].message
    assert "1.7 times the threads" in warnings[0].gain
    assert "2.5 CPUs" in warnings[1].message and "--cpus=3" in warnings[1].fix
    notes = [each for each in problems if each.level is Level.NOTE]
    assert "docker run --memory=128g" in notes[0].fix and "GiB more" in notes[0].gain
    assert [each.loss for each in warnings] == sorted((e.loss for e in warnings), reverse=True)
    assert [each.loss for each in notes] == sorted((e.loss for e in notes), reverse=True)


def test_an_empty_root_says_nothing(tmp_path: Path) -> None:
    assert read_tuning(tmp_path) == Tuning()
