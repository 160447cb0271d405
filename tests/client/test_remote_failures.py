"""Servers that fail, and hostile ones: each way is one sentence, and nothing that came is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from certificates import made_certificate
from client.conftest import RemoteRun, remote_chat
from client.openai_server import (
    DONE,
    Reply,
    ScriptedOpenAI,
    delta,
    event,
    openai_server,
    refused,
    said,
)
from hypothesis import given
from hypothesis import strategies as st

from ktcli.chat.recorder import ChatRecorder
from ktcli.client import serverclient
from ktcli.client.completion import Completion
from ktcli.client.serverclient import documents, listed_models
from ktcli.errors import KtError

HALF = [delta(role="assistant", content=""), delta(content="half an ")]
ERROR = {"error": {"message": "the worker is gone", "type": "server_error", "code": "worker_gone"}}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(HALF), "ended before the answer did"),
        (Reply([*HALF, delta(finish="stop")]), "ended before the answer did"),
        (Reply(HALF, cut=True), "broke off"),
        (Reply([*HALF, event(ERROR), DONE]), "failed during the answer: the worker is gone"),
        (Reply([*HALF, b"event: error\n", event({"message": "lost"}), DONE]), "answer: lost"),
        (Reply([*HALF, event({"object": "error", "message": "old"}), DONE]), "answer: old"),
        (Reply([*HALF, event({"error": "plain"}), DONE]), "answer: plain"),
        (Reply([*HALF, b"data: nonsense\n\n"]), "a line that is not an event"),
        (Reply([*HALF, b"data: [1]\n\n"]), "a line that is not an event"),
        (Reply([*HALF, delta(finish="content_filter"), DONE]), "early: 'content_filter'"),
    ],
)
def test_half_an_answer_is_an_error_and_is_kept(
    reply: Reply, words: str, run: RemoteRun, server: ScriptedOpenAI
) -> None:
    kept_chat(run, server)
    server.usual = reply
    code, said_, err = run("--continue", "and more?", server=None)
    assert (code, said_) == (6, "half an \n") and words in err
    assert len(server.chats) == 2  # it had begun: it is not asked for again
    server.usual = Reply(said("whole"))
    result = run("--continue", "is it again?", server=None)
    assert result[0] == 0, result
    turns = [turn["content"] for turn in server.chats[-1]["messages"]]
    assert turns == ["first", "hello", "and more?", "half an ", "is it again?"]


def kept_chat(run: RemoteRun, server: ScriptedOpenAI) -> None:
    """Keeps a chat with the server, as a person has it on a terminal."""
    chat = remote_chat(server)
    recorder = ChatRecorder(chat, pytest.fail)
    assert "".join(piece.text for piece in chat.ask("first")) == "hello"
    recorder.close()


def test_a_kept_chat_goes_on_at_its_server(
    run: RemoteRun, server: ScriptedOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_chat(run, server)
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    monkeypatch.setenv("KT_SERVER", "http://127.0.0.1:9")  # another one: the key is for that
    monkeypatch.setenv("KT_SERVER_KEY_FILE", str(key))
    assert run("--continue", "is it second?", server=None)[:2] == (0, "hello\n")
    assert all("authorization" not in headers for _, headers, _ in server.requests)
    assert [turn["content"] for turn in server.chats[-1]["messages"]] == [
        "first",
        "hello",
        "is it second?",
    ]
    monkeypatch.setenv("KT_SERVER", f"{server.url}/v1")
    assert run("--continue", "is it third?", server=None)[0] == 0
    assert server.requests[-1][1]["authorization"] == "Bearer secret"
    with openai_server() as other:  # nor does another server of the command line get it
        assert run("hi there", server=other.url)[0] == 0
        assert all("authorization" not in headers for _, headers, _ in other.requests)
        monkeypatch.delenv("KT_SERVER")
        assert run("hi there", server=other.url)[0] == 0
        assert other.requests[-1][1]["authorization"] == "Bearer secret"


def test_a_question_that_nobody_answers_is_not_kept(run: RemoteRun, server: ScriptedOpenAI) -> None:
    kept_chat(run, server)
    server.script.append(refused(422, "no"))
    code, _, err = run("--continue", "is it lost?", server=None)
    assert code == 6 and "refused the request: no" in err
    run("--continue", "is it third?", server=None)
    assert [turn["content"] for turn in server.chats[-1]["messages"]] == [
        "first",
        "hello",
        "is it third?",
    ]


# --- retries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        refused(429, "slow down", headers={"Retry-After": "0"}),
        refused(503, "draining", headers={"Retry-After": "0"}),
        refused(503, "busy"),
        refused(500, "oops"),
        Reply(HALF[:1], cut=True),
        Reply([event({"error": {"message": "busy", "type": "overloaded_error"}}), DONE]),
    ],
    ids=["429", "503", "503 alone", "500", "cut before the first token", "busy in the stream"],
)
def test_it_is_asked_again_before_the_first_token(
    reply: Reply, run: RemoteRun, server: ScriptedOpenAI
) -> None:
    server.script.append(reply)
    code, told, err = run("hi there")
    assert (code, told) == (0, "hello\n") and len(server.chats) == 2
    assert "retrying in" in err and "(1 of 3)" in err


def test_retries_end(run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.usual = refused(429, "slow down")
    code, told, err = run("hi there")
    assert (code, told) == (7, "") and "is busy: slow down" in err and len(server.chats) == 4
    server.usual = refused(503, "in an hour", headers={"Retry-After": "3600"})
    assert run("hi there")[0] == 7 and len(server.chats) == 5


def test_nobody_is_there(run: RemoteRun, server: ScriptedOpenAI) -> None:
    code, told, err = run("hi there", server="http://127.0.0.1:9")
    assert (code, told) == (6, "") and err.count("Connection refused; retrying") == 3
    assert "kt serve NAME" in err
    code, _, err = run("hi there", server="http://nobody.invalid")
    assert code == 6 and "no response from http://nobody.invalid" in err and "retrying" not in err


# --- hostile servers --------------------------------------------------------------------------------


def test_a_list_of_models_without_end(run: RemoteRun, server: ScriptedOpenAI) -> None:
    block = b'{"id": "m"}, ' * 8192
    server.models = Reply([b'{"data": [', *[block] * (50 << 20 >> 17)], headers={})
    code, _, err = run("hi there")
    assert code == 6 and "lists models in more than 4.0 MiB" in err and len(err) < 300
    server.models = {"data": [{"id": f"m{i}{'x' * 50}"} for i in range(20_000)]}
    code, _, err = run("hi there")
    assert code == 2 and "and 9,980 more" in err and len(err) < 3000


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": -1},
        {"prompt_tokens": 1e300, "completion_tokens": "many"},
        {"prompt_tokens": 1 << 70, "completion_tokens": True},
        {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 99}},
        [], "x", {"prompt_tokens_details": 5},
    ],
)  # fmt: skip
def test_counts_that_cannot_be_true(usage: Any, run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.usual = Reply(said("a", "b", usage=usage))
    counts = json.loads(run("hi there", "--json", "--stats")[1])["stats"]
    assert 0 <= counts["reused_tokens"] <= counts["prompt_tokens"] <= 4
    assert counts["eval_count"] == 2


def test_a_line_without_end(run: RemoteRun, server: ScriptedOpenAI) -> None:
    forever = threading.Event()
    server.usual = Reply([*HALF, b"data: " + b"x" * (2 << 20)], wait=forever)
    code, told, err = run("hi there")
    assert (code, told) == (6, "half an \n") and "a line of more than 1.0 MiB" in err
    assert server.left.wait(60)


def test_a_stream_without_end(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverclient, "STREAM_BYTES", 1 << 20)
    server.usual = Reply([b": waiting\n\n" * 4096] * 1000)
    code, told, err = run("hi there")
    assert (code, told) == (6, "") and "which is no answer to read" in err


def test_control_characters_reach_no_terminal(run: RemoteRun, server: ScriptedOpenAI) -> None:
    evil = "a\x1b]52;c;ZXZpbA==\x07b\u202ec\ud800"
    server.models = {"data": [{"id": evil}, {"id": "x"}]}
    code, _, err = run("hi there")
    assert code == 2 and "\x1b" not in err and "\u202e" not in err
    server.models = {"data": [{"id": "x"}]}
    server.usual = Reply([event({"error": {"message": evil}}), DONE])
    code, _, err = run("hi there")
    assert code == 6 and "\x1b" not in err and "\u202e" not in err
    server.usual = Reply(said("a\ud800b"))
    assert run("hi there")[:2] == (0, "a?b\n")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(
    status: int, run: RemoteRun, server: ScriptedOpenAI, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    with openai_server() as other:
        away = Reply(status=status, headers={"Location": f"{other.url}/v1/chat/completions"})
        server.usual = away
        code, _, err = run("hi there", "--server-key-file", str(key))
        assert code == 6 and "redirects to" in err and other.url in err and not other.requests
        server.models = away
        assert run("hi there")[0] == 6 and not other.requests


def test_another_kind_of_response(run: RemoteRun, server: ScriptedOpenAI) -> None:
    server.usual = Reply([b"{}"], headers={"Content-Type": "application/json"})
    code, _, err = run("hi there")
    assert code == 6 and "responded with application/json, not with an event stream" in err
    server.usual = Reply(
        [b"\x1f\x8b nonsense"],
        headers={"Content-Type": "text/event-stream", "Content-Encoding": "gzip"},
    )
    assert run("hi there")[0] == 6


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "it closed the connection"),
        (b"\x00\xff garbage\r\n\r\n", "what it sent is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "it sent less than it announced"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_what_is_not_http_is_said_in_words(sent: bytes, said: str, run: RemoteRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            for _ in range(4):  # the question, and again three times
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        code, _, err = run("hi there", server=f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert code == 6 and said in err.splitlines()[-2] + err.splitlines()[-1]


def test_a_certificate_is_verified(
    run: RemoteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, context = made_certificate(tmp_path, monkeypatch)
    with openai_server(context) as server:
        code, _, err = run("hi there", server=server.url)
        assert code == 6 and "the certificate of" in err and "cannot be verified" in err
        assert "retrying" not in err and not server.requests
        assert run("hi there", server=server.url.replace("https", "http"))[0] == 6
    code, _, err = run("hi there", server=run.url.replace("http", "https"))
    assert code == 6 and "does not speak TLS" in err


def test_a_server_that_falls_silent(
    run: RemoteRun, server: ScriptedOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.client.serverclient.SILENCE_S", 3.0)
    server.usual = Reply(HALF, wait=threading.Event())
    code, told, err = run("hi there")
    assert (code, told) == (6, "half an \n") and "sent nothing for 3 s" in err
    assert server.left.wait(60)


@pytest.mark.parametrize(
    "parts",
    [pytest.param([], marks=pytest.mark.thorough), HALF],
    ids=["before the first word", "in the answer"],
)
def test_ctrl_c_stops_the_server(
    parts: list[bytes], server: ScriptedOpenAI, tmp_path: Path
) -> None:
    server.usual = Reply(parts, wait=threading.Event())
    command = [sys.executable, "-m", "ktcli", "chat", "--server", server.url, "hi there"]
    env = {**os.environ, "KT_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if parts:
            assert process.stdout.read(4) == "half"
        else:
            while not server.chats:
                assert process.poll() is None
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert server.left.wait(60) and process.wait(60) == 130


# --- a conversation that does not fit ---------------------------------------------------------------


def test_the_oldest_turns_go_where_the_server_says_so(
    run: RemoteRun, server: ScriptedOpenAI
) -> None:
    kept_chat(run, server)
    full = refused(400, "too long", code="context_length_exceeded")
    run("--continue", "is it second?", server=None)
    server.script += [full, full]
    code, told, err = run("--continue", "is it third?", server=None)
    assert (code, told) == (
        0,
        "hello\n",
    ) and "the oldest 2 questions and their answers were left out" in err
    assert [len(chat["messages"]) for chat in server.chats[-3:]] == [5, 3, 1]
    server.script += [full] * 9
    code, _, err = run("is it alone?")
    assert code == 8 and "too long" in err


# --- anything at all --------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "delta", "content", "index", "tool_calls", "function", "name", "usage", "arguments",
                         "prompt_tokens", "finish_reason", "model", "id", "data", "meta", "n_ctx", "reasoning"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.lists(JSON, max_size=3))
def test_any_document_is_read_or_refused(document: Any, more: list[Any]) -> None:
    made = Completion()
    for each in ({"choices": [{"delta": document}]}, {"choices": more}, *more, document):
        if isinstance(each, dict):
            made.take(each)
    made.end()
    assert made.stats.tokens >= 0 and made.stats.prompt_tokens >= 0
    listed_models(document)
    listed_models({"data": more})


@given(
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"data: ", b"\n", b"{}", b"event: error", b"[DONE]"])
    )
)
def test_any_bytes_are_events_or_an_error(chunks: list[bytes]) -> None:
    parts: Callable[[list[bytes]], list[Any]] = lambda given: list(documents(given, "x"))  # noqa: E731
    results = []
    for given_ in (chunks, [b"".join(chunks)], [bytes([byte]) for byte in b"".join(chunks)]):
        try:
            results.append(repr(parts(given_)))
        except KtError as error:
            results.append(str(error))
    assert len(set(results)) == 1  # wherever it is cut
