"""GPUs as the driver lists them, as far as the environment shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.hardware.gpu import ask_driver, visible
from ktcli.hardware.machine import Gpu

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)


UUIDS = "GPU-aa11", "GPU-aa22", "GPU-bb33"


@pytest.mark.parametrize(
    ("named", "left"),
    [
        (None, "012"),
        ("2,0", "20"),
        (" 1 , 2", "12"),
        ("", ""),
        ("-1", ""),
        ("1,7,0", "1"),  # CUDA ignores everything from there on
        ("0,junk,1", "0"),
        ("junk", ""),
        ("-", ""),
        ("99", ""),
        ("9" * 5000, ""),
        ("\N{SUPERSCRIPT TWO}", ""),
        ("1st,+2", "12"),  # as C reads numbers
        ("0,1,0", ""),  # torch sees no GPU then
        ("GPU-bb,GPU-aa11", "20"),
        ("GPU-aa", ""),  # begins two
        ("GPU-bb33,1", "2"),
        ("GPU-bb,GPU-bb33", ""),
        ("NoDevFiles", ""),
    ],
)
def test_visible_devices(named: str | None, left: str) -> None:
    gpus = tuple(replace(GPU, index=i, name=str(i)) for i in range(3))
    found = visible(gpus, named, UUIDS)
    assert "".join(gpu.name for gpu in found) == left
    assert [gpu.index for gpu in found] == list(range(len(found)))


@pytest.mark.parametrize(
    "named", ["2,0", "1,7,0", "0,junk,1", "junk", "99", "1st,+2", "0,1,0", "", "-1"]
)
def test_as_many_are_visible_as_torch_counts(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", lambda: 3)
    gpus = tuple(replace(GPU, index=i) for i in range(3))
    assert len(visible(gpus, named)) == cuda._device_count_nvml()


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


ANSWERS = """#!/bin/sh
case "$1" in
*uuid) echo GPU-aa11; echo GPU-bb22 ;;
*) echo "0, NVIDIA A, 81559, 81000, 5, 16, 9.0, 580.1"; echo "1, NVIDIA B, 81559, 81000, 5, 16, 9.0, 580.1" ;;
esac
"""


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({}, ["NVIDIA A", "NVIDIA B"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, ["NVIDIA B"]),
        ({"CUDA_VISIBLE_DEVICES": "junk"}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5"}, ["NVIDIA GB10  one"]),  # a part: torch knows its size
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ["NVIDIA GB10  one"]),  # torch's numbers count
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["NVIDIA A", "NVIDIA B"]),
    ],
)
def test_what_the_environment_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], found: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(ANSWERS)
    program.chmod(0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**setting, "PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: True)
    assert [gpu.name for gpu in ask_driver()] == found


def test_a_gpu_that_nobody_answers_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the driver is too old')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("ktcli.hardware.gpu._PROGRAMS", ("nvidia-smi",))
    assert ask_driver() == ()
