"""A command that needs a model which is not here makes the offer of `kt pull`, and asks the same question once."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store.fake_hub import Hub, serve

from ktcli.main import main
from ktcli.resources import data_path
from ktcli.store import library

Capture = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"


class Terminal(io.StringIO):
    """Standard input that is typed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        folder = data_path("profiles", "kt-mini")
        running.repositories["org/mini"] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }
        yield running


def fetched(hub: Hub) -> int:
    """The bytes of weights that were sent, headers aside."""
    return sum(n for name, n in hub.sent.items() if name.endswith(".safetensors"))


@pytest.mark.parametrize(
    "command",
    [["chat", "org/mini", "hi"], ["eval", "org/mini", "--tokens", "9"], ["serve", "org/mini"]],
)
def test_without_a_terminal_the_command_is_told(
    command: list[str], hub: Hub, capsys: Capture
) -> None:
    assert main(command) == 2
    said = capsys.readouterr()
    assert "will not pull it without confirmation" in said.err and "kt pull org/mini" in said.err
    assert "--yes" in said.err and "licence" in said.err and "tokens/s" in said.err
    assert library.find("org/mini") is None
    assert fetched(hub) <= 64 << 10


def test_yes_pulls_and_a_model_that_is_here_is_not_asked_for(hub: Hub, capsys: Capture) -> None:
    line = ["chat", "org/mini", "hi", "-n", "2", "--json"]
    assert main([*line, "--yes"]) == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert found["ids"]
    hub.requests.clear()
    assert main(line) == 0
    assert hub.requests == []


@pytest.mark.parametrize("answer", ["n\n", "", "y\n"])
def test_on_a_terminal_it_is_one_question(
    answer: str, hub: Hub, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code = main(["chat", "org/mini", "hi", "-n", "2"])
    said = capsys.readouterr()
    assert said.err.count("Pull it? [y/N]") == 1
    assert code == (0 if answer == "y\n" else 1)
    assert (library.find("org/mini") is not None) == (answer == "y\n")
    assert ("nothing was pulled" in said.err) == (answer != "y\n")
