"""What a conversion says of its stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from convert import convert
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.native import Pool
from ktcli.weights import stages
from ktcli.weights.recipe import Recipe
from ktcli.weights.stages import Stages, Stopwatch


def test_time_counts_once_however_many_are_busy(monkeypatch: pytest.MonkeyPatch):
    now = iter([10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(now))
    clock = Stopwatch()
    with clock.running(), clock.running():
        pass
    assert clock.seconds == 3
    with pytest.raises(OSError), clock.running():
        raise OSError
    assert clock.seconds == 4


def test_rates_and_bound():
    found = Stages(1000, threads=2, seconds=5, reading=1, encoding=4, writing=2)
    assert found.bound == "encoding"
    assert (found.rate(found.seconds), found.rate(found.reading)) == (200, 1000)


def test_of_a_conversion(tmp_path: Path):
    """All bytes, no stage longer than the whole; what was there already counts as nothing."""
    folder = random_checkpoint(tmp_path / "source", QWEN3)
    recipe, out = Recipe.named("int4", "bf16"), tmp_path / "pack"
    report = convert(folder, out, recipe, Pool(2))
    found = report.stages
    assert found is not None and found.source_bytes == report.source_bytes
    for seconds in (found.reading, found.encoding, found.writing):
        assert 0 < seconds < found.seconds
    assert convert(folder, out, recipe, Pool(2)).stages is None
