"""`kt bench finetune` measures a step as a user types it, and the work that it counts is that of the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktcli.main import main
from ktcli.models import build, cut
from ktcli.planner.spec import Unit
from ktcli.store.catalog import find
from ktcli.training.bench import TrainingWork
from ktcli.training.lora import LoraSettings, factor_bytes, factors_for
from ktcli.weights.recipe import Recipe


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)


def test_a_step_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "finetune", "kt-mini", "--layers", "2", "-n", "60", "--length", "32"]
    words += ["--rank", "2", "--runs", "1", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["results"]
    assert (row["n_tokens"], row["layers"], row["rank"], row["runs"]) == (64, 2, 2, 1)
    assert all(row[key] > 0 for key in ("tok_s", "forward_ms", "backward_ms", "head_ms"))
    assert main(words) == 0
    assert "ms per layer" in capsys.readouterr().out


def test_too_long_a_document_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "finetune", "kt-mini", "-n", "9000", "--length", "9000"]) == 2
    assert "9000" in capsys.readouterr().err.replace(",", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "6"], "the model has 5 layers, but --layers asks for 6"),
        (["--tokens", "1"], "--tokens"),
        (["--length", "1"], "--length"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "finetune", "kt-mini", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_bytes_of_factors_are_known_before_they_are_made() -> None:
    entry = find("kt-mini")
    assert entry is not None
    model, settings = build(cut(entry.config, 2)), LoraSettings(3)
    made = factors_for(model, settings)
    each = [x for f in made for x in (f.a, f.b, f.gradient_a, f.gradient_b)]
    assert factor_bytes(model, settings) == sum(x.nbytes for x in each)


def test_the_work_of_a_layer() -> None:
    """Of experts 6kHI for each token forward, 10kHI backward; of the rest as much, and again where the layer is."""
    config = {"num_hidden_layers": 1}
    entry = find("qwen3-30b-a3b")
    assert entry is not None
    whole = {**entry.config, **config}
    model, recipe, tokens = build(cut(whole, 1)), Recipe.named("int4", "bf16"), 128
    work = TrainingWork.of(model, recipe, tokens, retain=True)
    spec = model.spec
    experts = 2 * 3 * spec.top_k * tokens * 2048 * 768
    assert work.forward_ops[Unit.INT8] == experts
    assert work.backward_ops[Unit.INT8] == experts * 2 // 3
    dense = work.forward_ops[Unit.BF16]
    assert work.backward_ops[Unit.BF16] == experts + dense
    again = TrainingWork.of(model, recipe, tokens, retain=False)
    assert sum(again.backward_ops.values()) == sum(work.backward_ops.values()) + dense
