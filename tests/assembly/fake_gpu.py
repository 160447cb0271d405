"""A machine with a GPU that is a fake: torch on the CPU stands in for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat.fake_engine import write_tokenizer
from reference import CASES, write_checkpoint

from ktcli.assembly import host as here
from ktcli.assembly import load as loads
from ktcli.engine.device import usable
from ktcli.hardware.machine import Gpu
from ktcli.hardware.probe import probe

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)


def make_checkpoint(folder: Path) -> Path:
    """A small random model that can be chatted with."""
    small = next(case for case in CASES if case.name == "qwen3")
    case = replace(small, values={**small.values, "vocab_size": 320})
    made = write_checkpoint(case, folder / "model")
    write_tokenizer(made)
    return made


def give_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the GPU into this machine."""
    found = replace(probe(), gpus=(GPU,))
    monkeypatch.setattr(here, "probe", lambda **_: found)
    monkeypatch.setattr("ktcli.hardware.probe.probe", lambda: found)
    monkeypatch.setattr(usable, "why_not", lambda: "")
    monkeypatch.setattr(loads, "torch_device", lambda index: torch.device("cpu"))


def prefer_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes plans use the GPU although models are small."""
    monkeypatch.setattr("ktcli.planner.placement.SMALL_BYTES", 0)
    monkeypatch.setattr("ktcli.planner.placement.Alone.fits", lambda *_: False)  # not the faster
