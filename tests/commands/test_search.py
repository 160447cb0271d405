"""`kt search`: the catalogue, both hubs, what kt says of what they find, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store.fake_hub import Hub, serve
from weights.fake_checkpoint import QWEN3

from ktcli.main import main
from ktcli.weights.checkpoint import MAX_CONFIG_BYTES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
        yield running


def config(**changed: Any) -> dict[str, bytes]:
    return {"config.json": json.dumps({**QWEN3, **changed}).encode()}


def found(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main(["search", *arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


def test_the_catalogue_is_searched_without_a_hub(hub: Hub, capsys: Capture) -> None:
    models = found(["Qwen3", "coder"], capsys)["models"]
    assert [each["name"] for each in models] == [
        "qwen3-coder-30b-a3b",
        "qwen3-coder-next",
    ]
    assert models[0]["family"] == "qwen3_moe" and models[0]["license"] == "apache-2.0"
    assert isinstance(models[0]["fits"], bool) and models[0]["need_bytes"]
    assert "minimax-m2" in {each["name"] for each in found(["minimax_m2"], capsys)["models"]}
    assert {each["name"] for each in found(["moonshotai/"], capsys)["models"]} >= {"kimi-k2"}
    assert hub.requests == []


def test_what_is_not_found_gets_the_nearest_and_the_hubs(capsys: Capture) -> None:
    error = found(["kimmi"], capsys, 3)["error"]
    assert "kimi-k2" in error["hint"] and "kt search kimmi --hub" in error["hint"]
    error = found(["kimmi", "--hub"], capsys, 3)["error"]
    assert "Hugging Face and ModelScope" in error["message"]


@pytest.mark.parametrize("source", ["hf", pytest.param("modelscope", marks=pytest.mark.thorough)])
def test_a_hub_is_judged_by_configs_alone(source: str, hub: Hub, capsys: Capture) -> None:
    hub.repositories = {
        "org/tiny-good": config() | {"model.safetensors": b"x" * 99},
        "org/tiny-strange": config(model_type="strange"),
        "org/tiny-quantized": config(quantization_config={"quant_method": "odd"}),
        "org/tiny-GGUF": {"tiny-Q4_K_M.gguf": b"x"},
        "org/tiny-broken": {"config.json": b"{"},
        "org/tiny-long": {"config.json": b" " * (MAX_CONFIG_BYTES + 1)},
        "org/other": config(),
    }
    rows = found(["tiny", "--from", source], capsys)["hubs"]
    runs = {each["repository"].removeprefix("org/tiny-"): each for each in rows}
    assert list(runs) == ["good", "strange", "quantized", "GGUF", "broken", "long"]
    assert [name for name, each in runs.items() if each["can_run"]] == ["good"]
    assert runs["good"]["fits"] and runs["good"]["parameters"] > 0
    assert runs["good"]["reference"] == ("" if source == "hf" else "ms:") + "org/tiny-good"
    assert runs["strange"]["family"] == "strange" and "architecture" in runs["strange"]["reason"]
    assert "odd" in runs["quantized"]["reason"] and "quants" in runs["GGUF"]["reason"]
    assert not any("safetensors" in line for line in hub.requests)
    assert len(found(["tiny", "--from", source, "--limit", "2"], capsys)["hubs"]) == 2


def test_a_gated_repository_is_said_to_be_gated(hub: Hub, capsys: Capture) -> None:
    hub.repositories = {"org/tiny": {}}
    hub.facts = {"gated": "manual"}
    [row] = found(["tiny", "--from", "hf"], capsys)["hubs"]
    assert row["gated"] is True


def test_one_hub_that_is_silent_does_not_hide_the_other(
    hub: Hub, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories = {"org/tiny": config()}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert [each["hub"] for each in found(["tiny", "--hub"], capsys)["hubs"]] == ["ms"]
    assert "cannot get" in found(["tiny", "--from", "hf"], capsys, 6)["error"]["message"]


def test_ids_from_a_server_that_are_none_are_not_shown(hub: Hub, capsys: Capture) -> None:
    hub.repositories = dict.fromkeys(["../tiny", "org/ti ny", "org/tiny\x1b[31m", "org/tiny;rm"])
    hub.repositories["org/tiny"] = config()
    rows = found(["ti", "--from", "hf"], capsys)["hubs"]
    assert [each["repository"] for each in rows] == ["org/tiny"]


@pytest.mark.parametrize("words", [[""], [" "], ["x" * 300], ["a\x1b[2J"], ["a\0b"]])
def test_words_that_nobody_can_search_for(words: list[str], capsys: Capture) -> None:
    assert "cannot search for" in found(words, capsys, 2)["error"]["message"]
    assert (
        "unknown hub 'elsewhere'"
        in found(["a", "--from", "elsewhere"], capsys, 2)["error"]["message"]
    )


def test_the_table_has_the_models_that_run_first(hub: Hub, capsys: Capture) -> None:
    hub.repositories = {"org/qwen3-tiny": config()}
    assert main(["search", "qwen3", "--from", "hf"]) == 0
    text = capsys.readouterr().out
    assert text.index("qwen3-0.6b") < text.index("qwen3-235b-a22b ") < text.index("org/qwen3-tiny")
