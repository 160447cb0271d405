"""A chat with a server on the terminal: the commands of any chat, and failures that it survives."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.conftest import remote_chat
from client.openai_server import DONE, Reply, ScriptedOpenAI, delta, event, said

from ktcli.chat.chats import load, newest
from ktcli.chat.remote import RemoteChat
from ktcli.client.serverclient import listed_models
from ktcli.commands.chat.remote import ServerModels
from ktcli.errors import KtError
from ktcli.terminal import slash
from ktcli.terminal.repl import talk
from ktcli.terminal.screen import Screen


class Terminal:
    """Types lines, and hears what is said beside the answers."""

    def __init__(self, *lines: str) -> None:
        self._lines: Iterator[str] = iter(lines)
        self.heard: list[str] = []
        self.screen = io.StringIO()

    def ask(self, draft: str = "") -> str | None:
        return next(self._lines, None)

    def note(self, text: str) -> None:
        self.heard.append(text)

    warn = note

    def error(self, error: KtError) -> None:
        self.heard.append(f"error: {error}")


def talked(
    server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, home: Path, *lines: str
) -> tuple[RemoteChat, Terminal, str]:
    """The chat that some lines make, whom they were said to, and what was written to the screen."""
    monkeypatch.setenv("KT_HOME", str(home))
    chat = remote_chat(server)
    terminal = Terminal(*lines)
    models = ServerModels(chat.server)
    models.of(chat)
    screen = Screen(terminal.screen, terminal=True, colour=False, columns=lambda: 80)
    talk(chat, terminal, screen, terminal, models=models)
    return chat, terminal, terminal.screen.getvalue()


def test_commands_work_as_in_any_chat(
    server: ScriptedOpenAI,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.models = {"data": [{"id": "m"}, {"id": "other"}]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    server.usual = Reply(said("he", "llo", usage=usage))
    lines = ["one", "/stats", "/retry", "/undo", "two", "/set temperature 0.5", "/set", "/model", "/model other",
             "three", "/set temperature default", "four", "/compact", "five"]  # fmt: skip
    chat, terminal, screen = talked(server, monkeypatch, tmp_path, *lines)
    heard = "\n".join(terminal.heard)
    assert screen.count("hello") == 6  # the answers, one of them again
    assert "context:              5 token(s)" in heard and "undone: one" in heard
    assert "temperature         0.5" in heard and "top-k               the server's own" in heard
    assert "m      answers now" in heard
    assert "other answers from now on" in capsys.readouterr().err
    assert [each["model"] for each in server.chats] == ["m"] * 3 + ["other"] * 4
    assert [each.get("temperature") for each in server.chats] == [None] * 3 + [
        0.5,
        None,
        None,
        None,
    ]
    assert chat.conversation.omitted.summary == "hello"
    last = server.chats[-1]["messages"][0]["content"]
    assert last.startswith("(A summary of the conversation before this: hello)")
    saved = load(newest() or tmp_path)
    assert saved.identity.server == server.url and saved.identity.asked == "other"
    assert saved.others["stated"] == []


def test_models_of_the_server_are_completed(server: ScriptedOpenAI) -> None:
    server.models = {"data": [{"id": "m"}, {"id": "other"}]}
    models = ServerModels(remote_chat(server).server)
    assert slash.words("/model ", models.known) == [("m", ""), ("other", "")]


def test_a_chat_outlives_its_server(
    server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost = {"error": {"message": "a \x1b[2J worker died"}}
    server.script += [Reply([delta(content="half"), event(lost), DONE]), Reply(said("whole"))]
    chat, terminal, _ = talked(server, monkeypatch, tmp_path, "one", "two")
    assert any(line.startswith("error: ") and "worker died" in line for line in terminal.heard)
    assert [turn["content"] for turn in chat.conversation.turns] == ["one", "half", "two", "whole"]


def test_control_characters_are_shown(
    server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.usual = Reply(said("a\x1b]0;title\x07b", "\u202e"))
    _, _, screen = talked(server, monkeypatch, tmp_path, "one")
    assert "\x1b]0" not in screen and "\u202e" not in screen and "␛]0;title" in screen


def test_a_server_of_kt_says_how_far_it_has_read(server: ScriptedOpenAI) -> None:
    progress = {"total": 900, "cache": 100, "processed": 612}
    server.usual = Reply([event({"choices": [], "prompt_progress": progress}), *said("x")])
    chat, told = remote_chat(server), []
    list(chat.ask("one", progress=lambda done, total: told.append((done, total))))
    assert told == [(512, 800)] and "return_progress" not in server.chats[-1]
    # A server that may not know the field is not sent it; one of kt is.
    kt = {"id": "m", "owned_by": "kt", "max_model_len": 2048}
    chat.go_to((listed_models({"data": [kt]}) or [])[0])
    list(chat.ask("two"))
    assert server.chats[-1]["return_progress"] is True and chat.context == 2048


def test_an_answer_that_is_left_stops_the_server(server: ScriptedOpenAI) -> None:
    server.usual = Reply(
        [delta(content="half"), delta(content=" an answer")], wait=threading.Event()
    )
    chat = remote_chat(server)
    pieces = chat.ask("one")
    assert next(pieces).text == "half"
    pieces.close()
    assert server.left.wait(60) and chat.conversation.turns[-1]["content"] == "half"
    stop = False
    pieces = chat.ask("two", cancelled=lambda: stop)
    next(pieces)
    stop = True
    assert list(pieces) == [] and chat.conversation.turns[-1]["content"] == "half"
