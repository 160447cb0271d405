"""benchmarks/gpu_probe.py: every check can be tried on a CPU, and one that fails ends no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "benchmarks" / "gpu_probe.py"


@pytest.mark.thorough
def test_every_check_runs(tmp_path: Path) -> None:
    """In Triton's interpreter, which a process decides on before it imports it."""
    for which, names in ((), 18), (("--memory-operations",), 3):
        out = tmp_path / "probe.json"
        command = [sys.executable, PROBE, out, "--smoke", *which]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = json.loads(out.read_text())
        assert len(found) == names
        assert done.returncode == 0, done.stdout  # no check failed
        assert not [name for name, said in found.items() if "traceback" in said]


@pytest.mark.thorough
def test_a_check_that_fails_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pytest.importorskip("triton", reason="needs triton")
    import gpu_probe

    def failing(_: object) -> None:
        raise RuntimeError("the GPU is gone")

    kept: list[dict[str, object]] = []
    device = torch.device("cpu")
    probe = gpu_probe.Probe(device, gpu_probe.stream_on(device))
    checks = {"first": failing, "second": lambda _: {"us": 1.0}}
    gpu_probe.probed(checks, probe, lambda document: kept.append(dict(document)))
    assert [list(each) for each in kept] == [["first"], ["first", "second"]]
    assert "the GPU is gone" in kept[-1]["first"]["error"] and kept[-1]["second"] == {"us": 1.0}
