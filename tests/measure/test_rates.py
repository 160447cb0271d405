"""What was measured is kept by whoever measures, also by several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ktcli.hardware import measured
from ktcli.hardware.machine import Cpu
from ktcli.measure import rates

CPU = Cpu("Some CPU", ("avx2",), (), 1, 2, 2, (0, 1))


def test_all_who_keep_something_at_the_same_time_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    counts = range(1, 25)
    with ThreadPoolExecutor(8) as several:
        list(several.map(lambda n: rates.keep(CPU, n, "avx2", {"n": n}), counts))
    assert [measured.entry(CPU, n, "avx2") for n in counts] == [{"n": n} for n in counts]
    assert [path.name for path in tmp_path.iterdir()] == ["measured.json"]
