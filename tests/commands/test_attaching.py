"""When a chat uses the model of somebody's server: where it is loaded, and no choice is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from ktcli.assembly.ready import Ready
from ktcli.commands.chat.attaching import Attaching
from ktcli.commands.cli import table
from ktcli.errors import UsageError
from ktcli.server.attached import backend, client
from ktcli.server.attached.client import ServerPlace
from ktcli.server.attached.wire import PROTOCOL, EngineFacts

FACTS = EngineFacts(PROTOCOL, "kt-mini", "a pack", 4096, 4096, 10, False, False)
Capture = pytest.CaptureFixture[str]


def asked(*words: str) -> Attaching:
    """What a command line of `kt chat` asks for."""
    command: Any = table.load("chat")
    context: typer.Context = command.make_context("chat", ["kt-mini", "hi", *words])
    return Attaching.of(context)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A server that has the model or can load it, by `facts`; `loads` counts."""
    monkeypatch.delenv("KT_TILE_MIN", raising=False)  # tests set it on a CPU with tiles
    state: dict[str, Any] = {"facts": FACTS, "loads": 0}

    def load(*_: object) -> EngineFacts:
        state["loads"] += 1
        return FACTS

    place = ServerPlace(Path("/run/11435.sock"), "kt-mini")
    monkeypatch.setattr("ktcli.commands.chat.attaching.server_sockets", lambda: [place.socket])
    monkeypatch.setattr(backend, "find", lambda ready: (place, state["facts"]))
    monkeypatch.setattr(client, "load", load)
    monkeypatch.setattr("ktcli.store.library.identity", lambda pack: "a pack")
    monkeypatch.setattr("ktcli.text.model.read_text_model", lambda *_, **__: "texts")
    monkeypatch.setattr(backend, "AttachedModel", lambda *facts: facts)
    return state


def attached(*words: str) -> bool:
    return asked(*words).attach(Ready("kt-mini", Path("/pack")), "kt-mini") is not None


def test_a_server_is_made_to_load_a_model_only_where_somebody_says_so(
    server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert attached() and attached("--attach", "always") and server["loads"] == 0
    assert not attached("--attach", "never") and not attached("--no-attach")
    server["facts"] = None
    assert not attached() and server["loads"] == 0
    assert attached("--attach", "always") and server["loads"] == 1
    monkeypatch.setenv("KT_ATTACH", "always")
    assert attached() and server["loads"] == 2
    assert not attached("--attach", "loaded") and server["loads"] == 2
    with pytest.raises(UsageError, match="cannot be used together"):
        asked("--no-attach", "--attach", "always")
    with pytest.raises(
        UsageError, match="--attach is 'often', which is not loaded, always or never"
    ):
        asked("--attach", "often")


@pytest.mark.parametrize(
    "words",
    ["--threads 2", "--numa off", "--kv fp8", "--device cpu", "--gpus 0", "--defer 1", "--no-kv-cache",
     "--prefill-threshold 9", "--gpu-experts 1", "KT_ISA=portable", "KT_TILE_MIN=4"],
)  # fmt: skip
def test_what_only_an_engine_of_its_own_can_do_is_not_attached(
    words: str, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if words.startswith("KT_"):
        monkeypatch.setenv(*words.split("="))
    assert not attached(*([] if words.startswith("KT_") else words.split()))
    assert f"{words.split()[0]} applies only to a model loaded here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["KT_THREADS=2", "KT_KV=fp8", "KT_DEVICE=cpu", "KT_NUMA=off", "KT_CACHE=0", "KT_HEAT=off"]
)  # fmt: skip
def test_a_variable_of_the_shell_that_a_server_does_not_hear_is_said(
    words: str, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.delenv("KT_CACHE", raising=False)
    monkeypatch.setenv(*words.split("="))
    assert attached()
    assert (
        f"{words}: ignored, because the server on port 11435 uses its own settings"
        in capsys.readouterr().err
    )


def test_a_longer_context_is_not_there(
    server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert attached("--context", "4096") and not attached("--context", "4097")
    monkeypatch.setenv("KT_CONTEXT", "4097")
    assert not attached()
    assert "its context there has 4,096 tokens" in capsys.readouterr().err
