"""GPUs as the driver lists them, as far as the environment shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.hardware.gpu import QUERY, _told, ask_driver, look_for_gpus, parse_gpus, visible
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
    assert [(gpu.name, gpu.vram_bytes, gpu.capability) for gpu in look_for_gpus().gpus] == found
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: False)
    assert len(look_for_gpus().gpus) == (answer is not None and "81559" in answer)


ANSWERS = """#!/bin/sh
case "$1" in
*uuid) echo "0, GPU-aa11"; echo "GPU 5 is lost"; echo "1, GPU-bb22" ;;
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
    assert [gpu.name for gpu in look_for_gpus().gpus] == found


def test_a_gpu_that_nobody_answers_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the driver is too old')")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("ktcli.hardware.gpu._PROGRAMS", ("nvidia-smi",))
    assert look_for_gpus().gpus == ()


LOST = "Unable to determine the device handle for GPU0000:25:00.0: GPU is lost."
GOOD_ROW = "1, NVIDIA B, 24564, 24000, 4, 16, 8.9, 550.54"


@pytest.mark.parametrize(
    ("script", "found", "unread"),
    [
        (f"echo '{GOOD_ROW}'; echo '{LOST}'; exit 15", ["NVIDIA B"], [LOST]),
        (f"echo '{LOST}' >&2; echo '{GOOD_ROW}'; exit 15", ["NVIDIA B"], [LOST]),
        ("echo 'No devices were found'; exit 6", [], ["No devices were found"]),
        ("exit 9", [], ["no answer, exit code 9"]),
        (
            f"echo '0, NVIDIA A, 81920, [Insufficient Permissions], 4, 16, 8.0, 510'; echo '{GOOD_ROW}'",
            ["NVIDIA B"],
            ["GPU 0, NVIDIA A: memory.free is [Insufficient Permissions]"],
        ),
        (
            f"echo '0, NVIDIA A, 81920, 81000, 4, 16, 8.0, 550, Enabled'; echo '{GOOD_ROW}, [N/A]'",
            ["NVIDIA B"],
            ["GPU 0, NVIDIA A: mig.mode.current is Enabled"],
        ),
    ],
)
def test_one_gpu_that_fails_hides_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    found: list[str],
    unread: list[str],
) -> None:
    _install(tmp_path, monkeypatch, script)
    seen = look_for_gpus()
    assert [gpu.name for gpu in seen.gpus] == found
    assert list(seen.unread) == unread


def test_torch_is_asked_where_a_gpu_is_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = "0, NVIDIA A, 81920, 81000, 4, 16, 8.0, 550, Enabled"
    _install(tmp_path, monkeypatch, f"echo '{row}'; echo '{GOOD_ROW}, Disabled'")
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: True)
    seen = look_for_gpus()
    assert [gpu.name for gpu in seen.gpus] == ["NVIDIA GB10  one"]
    assert not seen.unread


@pytest.mark.parametrize(
    ("unknown", "row", "capability"),
    [
        (("compute_cap",), "0, Tesla K80, 11441, 11000, 3, 16, 470.182, Disabled", None),
        (("mig.mode.current",), "0, Tesla K80, 11441, 11000, 3, 16, 3.7, 440.33", "3.7"),
        (("compute_cap", "mig.mode.current"), "0, Tesla K80, 11441, 11000, 3, 16, 440.33", None),
    ],
)
def test_an_old_driver_is_asked_for_what_it_knows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unknown: tuple[str, ...],
    row: str,
    capability: str | None,
) -> None:
    refusals = "".join(
        f"""*{name}*) echo 'Field "{name}" is not a valid field to query.'; exit 2;;\n"""
        for name in unknown
    )
    _install(tmp_path, monkeypatch, f"""case "$1" in\n{refusals}esac\necho '{row}'""")
    (gpu,) = look_for_gpus().gpus
    assert (gpu.name, gpu.free_bytes, gpu.capability) == ("Tesla K80", 11000 << 20, capability)
    assert gpu.driver in row


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a script in place of nvidia-smi, without torch."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("ktcli.hardware.gpu._PROGRAMS", ("nvidia-smi",))
    monkeypatch.setattr("ktcli.hardware.gpu.torch_installed", lambda: False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_programs_outside_ask_in_two_more_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that check kt on answers of nvidia-smi call these."""
    row = "0, GPU, 24564, 24000, 8.9"
    found = _told(row, QUERY)
    assert parse_gpus(row) == found.gpus
    monkeypatch.setattr("ktcli.hardware.gpu.look_for_gpus", lambda: found)
    assert ask_driver() is found.gpus
