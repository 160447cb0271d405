"""What fails on a GPU is found once, and not tried by the next start until something of its key is another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.assembly import known_failures
from ktcli.assembly.known_failures import known_failures_of, versions_of
from ktcli.assembly.measuring import measure_machine
from ktcli.engine.device.fallbacks import NONE_YET, Failures
from ktcli.hardware.machine import Gpu
from ktcli.hardware.probe import probe

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)
FAILED = Failures(kernels="out of resource", graphs="not permitted")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    return tmp_path


def test_what_failed_is_known_at_the_next_start() -> None:
    first = known_failures_of("m", [GPU])
    assert (first.known, first.found) == (NONE_YET.known, "")
    first.keep(FAILED)
    again = known_failures_of("m", [replace(GPU, free_bytes=1, read_bps=2e12)])
    assert again.known == FAILED and len(again.found) == len("2026-11-24")
    assert known_failures_of("other", [GPU]).known == Failures()
    said = list(again.sentences(FAILED))
    assert len(said) == 2 and all(f"found on {again.found}; after kt doctor" in s for s in said)
    new = list(again.sentences(replace(FAILED, graphs="something else")))
    assert "found on" in new[0] and "found on" not in new[1]


@pytest.mark.parametrize(
    "other",
    [{"name": "NVIDIA Other"}, {"capability": "9.1"}, {"driver": "581.0"}, {"driver": None}],
    ids=str,
)
def test_another_gpu_or_driver_tries_again(other: dict[str, str]) -> None:
    known_failures_of("m", [GPU]).keep(FAILED)
    assert known_failures_of("m", [replace(GPU, **other)]).known == Failures()
    assert known_failures_of("m", [GPU, replace(GPU, index=1, **other)]).known == Failures()
    assert known_failures_of("m", [GPU, replace(GPU, index=1)]).known == FAILED


@pytest.mark.parametrize("what", ["__version__", "torch.__version__", "_triton"])
def test_another_version_tries_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known_failures_of("m", [GPU]).keep(FAILED)
    changed: str | Callable[[], str] = (lambda: "99") if what == "_triton" else "99"
    before = versions_of([GPU])
    monkeypatch.setattr(f"ktcli.assembly.known_failures.{what}", changed)
    assert versions_of([GPU]) != before
    assert known_failures_of("m", [GPU]).known == Failures()


def test_no_triton_is_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise known_failures.PackageNotFoundError(name)

    monkeypatch.setattr(known_failures, "version", missing)
    assert "triton none" in versions_of([GPU])


@pytest.mark.usefixtures("briefly")
def test_measuring_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_TILE_MIN", "2")
    known_failures_of("m", [GPU]).keep(FAILED)
    measure_machine(replace(probe(gpus=False), gpus=()), 1)
    assert known_failures_of("m", [GPU]).known == Failures()


def test_a_library_that_cannot_be_written_ends_nothing(home: Path) -> None:
    (home / "gpu.json").mkdir()
    known_failures_of("m", [GPU]).keep(FAILED)
    assert known_failures_of("m", [GPU]).known == Failures()
