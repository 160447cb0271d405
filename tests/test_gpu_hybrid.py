"""benchmarks/gpu_hybrid.py runs from end to end, tiny and on the CPU; of its figures only the logits mean anything."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_hybrid

    return gpu_hybrid


def run(script: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["gpu_hybrid", "--smoke", "--out", str(out), *more])
    script.main()
    return json.loads(out.read_text())


@pytest.mark.thorough
def test_every_section_runs(script, tmp_path, monkeypatch):
    found = run(script, tmp_path / "found.json", monkeypatch)
    sections = found["sections"]
    assert list(sections) == list(script.SECTIONS)
    assert {name: each.get("error") for name, each in sections.items()} == dict.fromkeys(sections)
    assert all(each["rows"] for each in sections.values())
    assert found["smoke"] is True
    for row in sections["logits"]["rows"]:
        assert row["max_error_of_std"] <= 1e-4 and row["max_error_of_std_decode"] <= 1e-4
    assert {row["handoff"] for row in sections["handoff"]["rows"]} == {"calls", "flags"}
    decode = sections["decode qwen3-30b-a3b"]["rows"]
    assert {"decode", "deferral", "kernels"} == {row["work"] for row in decode}
    batches = [row["batch"] for row in sections["answers at once"]["rows"]]
    assert batches == [1, 3] * 2
    assert [row["cache"] for row in sections["caches"]["rows"]] == ["bf16", "fp8"]
    rows = sections["adapters"]["rows"]
    assert [row["adapter"] for row in rows] == [False, False, True, True] * 2
    prompts = sections["prefill"]["rows"]
    assert {row["way"] for row in prompts if row["work"] == "prefill"} == {
        "streamed, gathered first", "streamed", "CPU experts", "CPU alone"
    }  # fmt: skip
    assert [row["gb"] > 0 for row in prompts if row["work"] == "pinning"] == [True]
    assert len({row.get("policy") for row in sections["policies"]["rows"]} - {None}) == 4


@pytest.mark.thorough
def test_a_section_that_fails_is_recorded_and_the_rest_goes_on(script, tmp_path, monkeypatch):
    def failing(place):
        yield {"work": "half"}
        raise RuntimeError("the GPU is gone")

    monkeypatch.setitem(script.SECTIONS, "logits", failing)
    found = run(
        script, tmp_path / "found.json", monkeypatch, "--only", "logits", "--only", "handoff"
    )
    broken, whole = found["sections"]["logits"], found["sections"]["handoff"]
    assert broken["error"] == "RuntimeError: the GPU is gone"
    assert broken["rows"] == [{"work": "half"}]
    assert "error" not in whole and len(whole["rows"]) == 2


@pytest.mark.thorough
def test_a_row_is_kept_before_the_next_is_measured(script, tmp_path, monkeypatch):
    out, kept = tmp_path / "found.json", []

    def two(place):
        for work in ("first", "second"):
            if out.exists():
                kept.append(json.loads(out.read_text())["sections"]["logits"]["rows"])
            yield {"work": work}

    monkeypatch.setitem(script.SECTIONS, "logits", two)
    run(script, out, monkeypatch, "--only", "logits")
    assert kept == [[{"work": "first"}]]


@pytest.mark.thorough
def test_a_row_stands_without_its_trace(script, tmp_path, monkeypatch):
    import gpu_sections

    def failing(*_):
        raise ValueError("the profiler saw nothing")

    monkeypatch.setattr(gpu_sections, "traced", failing)
    found = run(script, tmp_path / "found.json", monkeypatch, "--only", "decode qwen3-30b-a3b")
    rows = [row for row in found["sections"]["decode qwen3-30b-a3b"]["rows"] if "tok_s" in row]
    assert rows and all("saw nothing" in row["trace_error"] for row in rows)


def test_a_smoke_run_is_no_result(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_hybrid", "--smoke"])
    with pytest.raises(SystemExit):
        script.main()
