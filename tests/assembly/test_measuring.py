"""Measuring a machine with a GPU that is a fake: torch on the CPU stands in for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ktcli.assembly import host as here
from ktcli.engine.device import usable
from ktcli.hardware.gpu import GpusFound
from ktcli.hardware.machine import Gpu
from ktcli.main import main

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)


@pytest.mark.usefixtures("briefly")
def test_doctor_measures_a_gpu_and_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setattr(usable, "why_not", lambda: "")
    monkeypatch.setattr(here, "torch_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr("ktcli.hardware.probe.read_gpus", lambda root: GpusFound((GPU,)))
    found = []
    for words in (["--measure"], []):
        assert main(["doctor", "--json", *words]) in (0, 1)
        (shown,) = json.loads(capsys.readouterr().out)["machine"]["gpus"]
        found.append([shown[name] for name in ("read_bps", "bf16_ops", "copy_bps")])
    assert found[0] == found[1] and None not in found[0]
    assert found[0][0] != GPU.read_bps
