"""GPUs as the driver lists them, as far as the environment shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.hardware.gpu import ask_driver, visible
from ktcli.hardware.machine import Gpu

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)


def test_visible_devices() -> None:
    gpus = tuple(replace(GPU, index=i, name=str(i)) for i in range(3))
    names = lambda said: [(g.index, g.name) for g in visible(gpus, said)]  # noqa: E731
    assert names(None) == [(0, "0"), (1, "1"), (2, "2")] == names("GPU-8f3a")
    assert names("2,0") == [(0, "2"), (1, "0")]
    assert names("") == [] == names("-1") and names("1,7,0") == [(0, "1")]
    assert names("²") == names("--1") == names("9" * 5000) == names(None)


TORCH = """
from types import SimpleNamespace
FACTS = SimpleNamespace(name="NVIDIA GB10, one", major=12, minor=1)
cuda = SimpleNamespace(
    device_count=lambda: 1, get_device_properties=lambda i: FACTS, mem_get_info=lambda i: (100 << 30, 119 << 30)
)
"""
ROW = "0, NVIDIA H100, {}, 81000, 5, 16, 9.0, 580.1"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (ROW.format(81559), [("NVIDIA H100", 81559 << 20, "9.0")]),
        (ROW.format("[N/A]"), [("NVIDIA GB10  one", 119 << 30, "12.1")]),
        (None, [("NVIDIA GB10  one", 119 << 30, "12.1")]),  # no such program
    ],
)
def test_torch_is_asked_where_nvidia_smi_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, found: list[object]
) -> None:
    (tmp_path / "bin").mkdir()
    if answer is not None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{answer}'\n")
        program.chmod(0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setattr("ktcli.hardware.gpu._PROGRAMS", ("nvidia-smi",))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(gpu.name, gpu.vram_bytes, gpu.capability) for gpu in ask_driver()] == found
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: False)
    assert len(ask_driver()) == (answer is not None and "81559" in answer)


def test_a_gpu_that_nobody_answers_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the driver is too old')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("ktcli.hardware.gpu._PROGRAMS", ("nvidia-smi",))
    assert ask_driver() == ()
