"""GPUs as the driver lists them, as far as the environment shows them."""

from __future__ import annotations

from dataclasses import replace

from ktcli.hardware.gpu import visible
from ktcli.hardware.machine import Gpu

GPU = Gpu(0, "NVIDIA Test", 8 << 30, 8 << 30, 16e9, "9.0", "580.1", 1e12, 1e14)


def test_visible_devices() -> None:
    gpus = tuple(replace(GPU, index=i, name=str(i)) for i in range(3))
    names = lambda said: [(g.index, g.name) for g in visible(gpus, said)]  # noqa: E731
    assert names(None) == [(0, "0"), (1, "1"), (2, "2")] == names("GPU-8f3a")
    assert names("2,0") == [(0, "2"), (1, "0")]
    assert names("") == [] == names("-1") and names("1,7,0") == [(0, "1")]
    assert names("²") == names("--1") == names("9" * 5000) == names(None)
