"""Kept measurements: what is read back, and a file that says something else."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.hardware import measured
from ktcli.hardware.machine import Cpu, Gpu, Measured
from ktcli.measure import rates

CPU = Cpu("Some CPU", ("avx2",), (), 1, 2, 2, (0, 1))
GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)
RATES = Measured("avx2", 2, 1e10, 1e12, 1e11, "2026-01-01")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    for name in ("KT_ISA", "KT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_what_was_saved_comes_back() -> None:
    assert measured.load(CPU, 2) is None
    rates.save(CPU, RATES)
    assert measured.load(CPU, 2) == RATES
    assert measured.load(CPU, 1) is None
    two = replace(RATES, nodes=2)
    rates.save(CPU, two)
    assert measured.load(CPU, 2) == two


@pytest.mark.parametrize("value", [0, -1, 1e-300, float("nan"), float("inf"), 10**400, "fast", []])
def test_a_rate_that_is_none_is_no_measurement(value: object, home: Path) -> None:
    rates.save(CPU, RATES)
    path = home / "measured.json"
    known = json.loads(path.read_text())
    next(iter(known.values()))["int8_ops"] = value
    path.write_text(json.dumps(known))
    assert measured.load(CPU, 2) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_no_measurement(content: bytes, home: Path) -> None:
    (home / "measured.json").write_bytes(content)
    assert measured.load(CPU, 2) is None


@pytest.mark.parametrize("depth", [5, 400, 990, 1500])
def test_what_nests_is_dropped_by_the_next_write(depth: int, home: Path) -> None:
    rates.save(CPU, RATES)
    path = home / "measured.json"
    known = path.read_text().rstrip().removesuffix("}")
    nested = "[" * depth + "]" * depth
    path.write_text(f'{known}, "x": {{"a": {nested}}}, "y": {nested}}}')
    rates.keep(CPU, 1, "avx2", {"a": 1})
    kept = json.loads(path.read_text())
    assert len(kept) in (1, 2) and not {"x", "y"} & kept.keys()
    assert measured.entry(CPU, 1, "avx2") == {"a": 1}


@pytest.mark.parametrize("nodes", [-5, 0, 10**18])
def test_so_many_nodes_are_none(nodes: int) -> None:
    rates.save(CPU, replace(RATES, nodes=nodes))
    assert measured.load(CPU, 2) is None


def test_a_pipe_is_not_waited_for(home: Path) -> None:
    os.mkfifo(home / "measured.json")
    assert measured.load(CPU, 2) is None


@pytest.mark.parametrize("found", [{}, {"read_bps": 1}, {"read_bps": "x"}, [], {"read_bps": -1}])
def test_damaged_rates_are_none(
    found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    (tmp_path / "measured.json").write_text(json.dumps({"GPU | NVIDIA Test": found}))
    assert measured.with_rates(GPU) == GPU
