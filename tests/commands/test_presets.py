"""Presets on the command line: what wins over what, for the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kt
from ktcli.assembly.presets import preset_over
from ktcli.main import main
from ktcli.sampling import SamplingSettings
from ktcli.store.preset import NOTHING, Preset
from ktcli.text.settings import Settings

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_preset_lies_between_the_options_and_the_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    document(["alias", "terse", "kt-mini", "--max-tokens", "4", "--temperature", "0"], capsys)
    monkeypatch.setenv("KT_MAX_TOKENS", "7")
    length = lambda *more: len(document(["chat", *more], capsys)["ids"])  # noqa: E731
    question = "What does kt convert do?"
    assert length("terse", question) == 4
    assert length("kt-mini", question) == 7
    assert length("terse", question, "-n", "6") == 6
    first = document(["chat", "terse", question], capsys)
    assert first["ids"] == document(["chat", "terse", question], capsys)["ids"]
    assert main(["config", "set", "model", "terse"]) == 0
    capsys.readouterr()
    assert length(question) == 4


def test_the_system_text_of_a_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    system, preset = "Sing like a bird, please.", "Be brief."
    document(["alias", "brief", "kt-mini", "--system", preset], capsys)

    def read(*more: str) -> int:
        said = document(["chat", *more, "hi", "-n", "1"], capsys)
        return int(said["stats"]["prompt_tokens"])

    alone, with_preset = read("kt-mini"), read("kt-mini", "--system", preset)
    assert alone != with_preset
    assert read("brief") == with_preset
    monkeypatch.setenv("KT_SYSTEM", system)
    assert read("brief") == with_preset != read("kt-mini")
    assert read("brief", "--system", system) == read("kt-mini")
    assert read("brief", "--system", "") == alone


def test_the_context_of_a_name(home: Path, capsys: Capture) -> None:
    document(["alias", "small", "kt-mini", "--context", "64"], capsys)
    long = "word " * 80
    assert document(["chat", "small", long], capsys, 8)["error"]["exit_code"] == 8
    document(["chat", "small", long, "-n", "1", "--context", "512"], capsys)
    document(["chat", "kt-mini", long, "-n", "1"], capsys)


def test_a_server_gets_the_preset_of_its_name(home: Path, capsys: Capture) -> None:
    document(["alias", "terse", "kt-mini", "--system", "Be brief.", "--context", "96"], capsys)
    seen: list[Any] = []

    class Watched:
        def __init__(self, service: Any) -> None:
            seen.append(service)

        def run(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktcli.commands.serve.own_engine.Serving", Watched)
        assert main(["serve", "terse", "--port", "18437", "-q"]) == 0
        assert main(["serve", "kt-mini", "--port", "18437", "-q"]) == 0
    assert seen[0].rules.preset == Preset.of({"system": "Be brief.", "context": 96})
    assert (seen[0].wanted.context, seen[1].wanted.context) == (96, None)
    assert seen[1].rules.preset == NOTHING


def test_what_a_preset_leaves_out_is_the_models() -> None:
    own = Settings(SamplingSettings(0.6, 20, 0.9, greedy=True), 9, ("x",), True, think_budget=4)
    assert preset_over(NOTHING, own) == own
    over = preset_over(Preset.of({"top-k": 3, "think": False, "stop": "y"}), own)
    assert over.sampling == SamplingSettings(0.6, 3, 0.9)  # which draws
    assert (over.max_tokens, over.stops, over.thinking, over.think_budget) == (9, ("y",), False, 4)


def test_what_cannot_be_preset(capsys: Capture) -> None:
    for wrong in (
        ["a", "kt-mini", "--temperature", "101"],
        ["a", "kt-mini", "--system", "\x1b[2J"],
        ["a", "kt-mini", *["--stop", "x"] * 17],
        ["a", "kt-mini", "--seed", "-1"],
        ["--rm", "a", "--top-k", "3"],
    ):
        assert document(["alias", *wrong], capsys, 2)["error"]["message"].isprintable()
    assert document(["alias", "a", "--top-k", "3"], capsys, 3)["error"]["hint"]
    assert document(["alias"], capsys) == {"aliases": []}


@pytest.mark.thorough
def test_python_programs_have_it_too(capsys: Capture) -> None:
    document(["alias", "brief", "kt-mini", "--system", "Be brief.", "--max-tokens", "3"], capsys)
    document(["alias", "brief", "--context", "96", "--temperature", "0"], capsys)
    asked = [{"role": "user", "content": "hi"}]
    own = [{"role": "system", "content": "Be brief."}, *asked]
    with kt.load("brief", threads=1) as engine:
        assert engine.context == 96
        first, second = engine.generate([asked, own])
        assert first.stats.prompt_tokens == second.stats.prompt_tokens and len(first.ids) == 3
        assert kt.Chat(engine).messages == own[:1]
        assert len(engine.generate([asked], max_tokens=2)[0].ids) == 2
    with kt.load("brief", threads=1, context=128) as engine:
        assert engine.context == 128
