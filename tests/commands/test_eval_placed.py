"""`kt eval` with placement rules and on a GPU, for which torch on the CPU stands in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from assembly.fake_gpu import give_gpu
from mini_library import NEEDS_KT_MINI

from ktcli.assembly import load as loads
from ktcli.engine import Engine
from ktcli.main import main

Capture = pytest.CaptureFixture[str]
pytestmark = [NEEDS_KT_MINI, pytest.mark.usefixtures("shared_home")]
TOKENS = ("-n", "300", "-c", "100")
RULES = """
[[rule]]
match = "layers.*.experts.0-3"
place = "cuda:0"
[[rule]]
match = "layers.*.experts"
place = "cpu"
"""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of engines that are loaded."""
    give_gpu(monkeypatch)
    found: list[str] = []
    load = loads.load

    def noted(*given: Any, **more: Any) -> Engine:
        engine = load(*given, **more)
        found.append(type(engine).__name__)
        return engine

    monkeypatch.setattr("ktcli.judging.prediction.load", noted)
    return found


def evaluate(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main(["eval", "kt-mini", *TOKENS, *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["results"]
    return found


def test_rules_place_what_is_evaluated(capsys: Capture, loaded: list[str], tmp_path: Path) -> None:
    """On the CPU without them, whatever GPUs there are; the loss is nearly the same. Several go one after the other."""
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    (own,) = evaluate(capsys)
    (placed,) = evaluate(capsys, "--placement", str(rules))
    assert loaded == ["CpuEngine", "DeviceEngine"]
    assert placed["nll"] == pytest.approx(own["nll"], rel=2e-3)
    evaluate(capsys, "--device", "cuda", "--gpu-experts", "2", "--formats", "int8,int4-mixed")
    assert loaded[2:] == ["DeviceEngine"] * 2


def test_rules_for_the_cpu_change_nothing(
    capsys: Capture, loaded: list[str], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "*"\nplace = "cpu"\n')
    assert evaluate(capsys) == evaluate(capsys, "--placement", str(rules))
    assert loaded == ["CpuEngine"] * 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--placement", "missing.toml"), "cannot read the file of placement rules missing.toml"),
        (("--device", "tpu"), "tpu"),
        (("--device", "cuda", "--split"), "--split measures on the CPU"),
        (("--device", "cuda", "--tasks", "t.jsonl"), "--device has no effect with --tasks"),
    ],
)
def test_what_cannot_be_is_said(capsys: Capture, words: tuple[str, ...], sentence: str) -> None:
    assert main(["eval", "kt-mini", *words]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
