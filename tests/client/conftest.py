"""For the tests of chats with a server: a scripted server, and `kt chat` beside it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.openai_server import ScriptedOpenAI, openai_server

from ktcli.chat.remote import RemoteChat
from ktcli.client.address import ServerAddress
from ktcli.client.serverclient import ListedModel, ServerClient
from ktcli.main import main
from ktcli.text.settings import Settings


class RemoteRun:
    """Runs command lines of `kt chat` with a server."""

    def __init__(self, url: str, capture: pytest.CaptureFixture[str]) -> None:
        self.url, self.capture = url, capture

    def __call__(self, *words: str, server: str | None = "") -> tuple[int, str, str]:
        """Returns exit code, stdout and stderr.

        Args:
            server: the address; empty: the scripted one; None: the option is not given.
        """
        option = [] if server is None else ["--server", server or self.url]
        code = main(["chat", *option, *words])
        told = self.capture.readouterr()
        return code, told.out, told.err


def remote_chat(server: ScriptedOpenAI, name: str = "m") -> RemoteChat:
    """A chat with a model of a server, before its first question."""
    client = ServerClient(ServerAddress.parse(server.url, "--server"))
    return RemoteChat(client, ListedModel(name), Settings(stated=frozenset()))


@pytest.fixture
def server() -> Iterator[ScriptedOpenAI]:
    with openai_server() as made:
        yield made


@pytest.fixture
def run(
    server: ScriptedOpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> RemoteRun:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr("ktcli.store.retrying.FIRST_S", 0.001)
    return RemoteRun(server.url, capsys)
