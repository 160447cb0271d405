"""A server under clients that leave, wait, send half of what they should, or may not ask at all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from chat.fake_engine import FakeEngine
from ports import free_port
from server.running import Running, one_key, running, scripted
from waits import until

from ktcli.commands.serve import sockets as serve_sockets
from ktcli.engine.logits import Logits
from ktcli.engine.request import Finish, Finished, GenerationRequest
from ktcli.engine.scheduler import Limits
from ktcli.errors import Busy, KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.native import Batch
from ktcli.server.http import answering, guard
from ktcli.server.http.access import LOOPBACK
from ktcli.server.http.state import Rules
from ktcli.server.models.enginethread import EngineThread
from ktcli.server.process import listening
from ktcli.server.process.background import log_path
from ktcli.server.process.discovery import (
    FoundServer,
    connected,
    running_servers,
    socket_path,
    status_of,
    stop,
)
from ktcli.server.process.listening import tcp_socket, unix_socket

LONG = "x" * 3000  # an answer that goes on until it is cancelled


def script(question: str) -> str:
    return LONG if question == "long" else f"you said {question}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = scripted(tmp_path_factory.mktemp("model"), script)
    with running(model, limits=Limits(waiting=2, active=2)) as found:
        yield found


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """A server that has nothing to do, and goes on after the test."""
    yield shared
    until(lambda: shared.leases == 0)


def body(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


def ask(server: Running, text: str, **more: object) -> requests.Response:
    return requests.post(f"{server.url}/v1/chat/completions", json=body(text, **more), timeout=60)


def send(server: Running, text: str, **more: object) -> socket.socket:
    """Sends a request, and leaves its answer to be read."""
    data = json.dumps(body(text, **more)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


def full(server: Running, waiting: int, **more: object) -> list[socket.socket]:
    """Two clients whose answers are made, and some that wait."""
    clients = [send(server, "long", **more) for _ in range(2)]
    until(lambda: health(server)["running"] == 2)
    clients += [send(server, "long", **more) for _ in range(waiting)]
    until(lambda: health(server)["waiting"] == waiting)
    return clients


def health(server: Running) -> dict[str, int]:
    found: dict[str, int] = requests.get(f"{server.url}/health", timeout=60).json()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_answer_and_its_place(server: Running, stream: bool) -> None:
    pages = server.engine.pools.pages
    free = pages.available
    clients = full(server, 1, stream=stream)
    for client in clients:
        client.close()
    until(lambda: health(server)["running"] + health(server)["waiting"] == 0)
    until(lambda: pages.available == free and server.leases == 0)
    assert ask(server, "still here?").json()["choices"][0]["message"]["content"].endswith("here?")


@pytest.mark.parametrize(
    ("path", "more", "finish"),
    [
        ("/v1/chat/completions", {}, '"finish_reason":"length"'),
        ("/v1/responses", {"input": "long"}, '"status":"incomplete"'),
        ("/v1/messages", {"max_tokens": 4000}, '"stop_reason":"max_tokens"'),
        ("/api/chat", {}, '"done_reason":"length"'),
    ],
)
def test_an_answer_is_cancelled_by_its_id(
    server: Running, path: str, more: dict[str, object], finish: str
) -> None:
    asked = body("long", stream=True, model="x", **more)
    with requests.post(server.url + path, json=asked, stream=True, timeout=60) as answer:
        id = answer.headers["x-request-id"]
        other = requests.post(
            f"{server.url}/cancel/{id}", headers={"x-api-key": "other"}, timeout=60
        )
        assert other.status_code == 404  # it is another caller's
        said = requests.post(f"{server.url}/cancel/chatcmpl-{id}", timeout=60)
        assert said.json() == {"id": f"chatcmpl-{id}", "cancelled": True}
        assert finish in answer.text.replace('": ', '":')
    assert requests.post(f"{server.url}/cancel/{id}", timeout=60).status_code == 404


def test_nobody_is_taken_for_another_client(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []
    other = {"X-Forwarded-For": "203.0.113.7", "Forwarded": "for=203.0.113.7"}
    with running(scripted(tmp_path, script), log=logged.append) as server:
        asked = body("long", stream=True, model="x")
        url = f"{server.url}/v1/chat/completions"
        with requests.post(url, json=asked, headers=other, stream=True, timeout=60) as answer:
            id = answer.headers["x-request-id"]
            # The same client, whatever it calls itself.
            assert requests.post(f"{server.url}/cancel/{id}", timeout=60).status_code == 200
            assert answer.text
        until(lambda: len(logged) == 2)
    assert {entry["client"] for entry in logged} == {"127.0.0.1"}


def test_more_than_may_wait_are_told_to_come_again(server: Running) -> None:
    clients = full(server, 2)
    answer = ask(server, "hello")
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "rate_limit_error"
    for client in clients:
        client.close()


def test_a_stream_shows_that_it_is_alive_while_it_waits(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "ALIVE_S", 0.02)
    clients = full(server, 0)
    waiting = send(server, "hello", stream=True)
    got = b""
    while b": waiting" not in got:
        got += waiting.recv(1000)
    assert got.startswith(b"HTTP/1.1 200")
    for client in (*clients, waiting):
        client.close()


def test_an_engine_that_fails_ends_streams_with_an_error_and_goes_on(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: object) -> None:
        raise RuntimeError("a thing nobody foresaw")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "run", broken)
        streamed = ask(server, "hello", stream=True).text
        whole = ask(server, "hello")
    events = [line for line in streamed.split("\n\n") if line]
    assert "nobody foresaw" in json.loads(events[-2][6:])["error"]["message"]
    assert events[-1] == "data: [DONE]"
    assert whole.status_code == 500 and "nobody foresaw" in whole.json()["error"]["message"]
    assert server.leases == 0
    assert ask(server, "hello").status_code == 200


KEY = "a secret"


def test_a_refusal_leaves_no_traceback(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(server, "word " * 5000).status_code == 400
    assert ask(server, "hello").status_code == 200  # by now all of the first is said
    assert not caplog.records


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    backend = scripted(tmp_path_factory.mktemp("model"), script)
    with running(backend, Rules(one_key(KEY), hosts=LOOPBACK)) as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer a secre"}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "Host": "evil.example"}, 403),
        ({"x-api-key": KEY, "Host": "LOCALHOST:80"}, 200),
        ({"x-api-key": KEY, "Origin": "http://evil.example"}, 403),
        ({"x-api-key": KEY, "Origin": "null"}, 403),
        ({"x-api-key": KEY, "Origin": "http://localhost:80", "Host": "localhost:80"}, 200),
        ({"x-api-key": KEY, "Origin": "http://localhost:81", "Host": "localhost:80"}, 403),
    ],
)
def test_only_who_may_come_in_comes_in(
    guarded: Running, headers: dict[str, str], status: int
) -> None:
    answer = requests.get(f"{guarded.url}/v1/models", headers=headers, timeout=60)
    assert answer.status_code == status
    assert ("error" in answer.json()) == (status != 200)
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert requests.get(f"{guarded.url}/health", timeout=60).status_code == 200


def test_a_body_is_of_bounded_size_whether_it_says_so_or_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_BYTES", 1000)
    url = f"{server.url}/v1/chat/completions"
    assert requests.post(url, data=b"x" * 1001, timeout=60).status_code == 413
    assert requests.post(url, data=iter([b"x" * 600, b"x" * 600]), timeout=60).status_code == 413


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: "]
)
def test_half_a_head_is_waited_for_a_while(
    server: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(listening, "HEAD_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(sent)
        assert client.recv(100) == b""


def test_half_a_second_head_is_waited_for_a_while(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = b""
        while not got.endswith(b"}"):
            got += client.recv(1000)
        assert got.startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(listening, "HEAD_S", 0.05)
        client.sendall(b"GET /heal")
        assert client.recv(1000) == b""


def test_half_a_body_is_waited_for_a_while(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        client.sendall(head)
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_strict_server_knows_its_names_only(tmp_path: Path) -> None:
    rules = Rules(strict_model=True, aliases=("mine",))
    with running(scripted(tmp_path, script), rules) as server:
        statuses = [ask(server, "x", model=name).status_code for name in ("fake", "mine", "gpt")]
        assert statuses == [200, 200, 404]


def test_paths_and_methods_that_are_not_there(server: Running) -> None:
    assert requests.get(f"{server.url}/v1/nothing", timeout=60).status_code == 404
    answer = requests.get(f"{server.url}/v1/chat/completions", timeout=60)
    assert answer.status_code == 405 and "error" in answer.json()


def test_counters_count(tmp_path: Path) -> None:
    with running(scripted(tmp_path, script)) as server:
        ask(server, "hello")
        text = requests.get(f"{server.url}/metrics", timeout=60).text
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(rows["kt_generation_tokens_total"]) > 3
    assert float(rows['kt_request_success_total{finished_reason="stop"}']) == 1
    assert float(rows["kt_time_to_first_token_seconds_count"]) == 1
    assert float(rows["kt_num_requests_running"]) == 0


def test_a_thread_that_ends_takes_nothing_and_cancels_what_is_there(tmp_path: Path) -> None:
    backend = scripted(tmp_path, script)
    thread = EngineThread(backend.engine, Limits())
    heard: list[object] = []
    prompt = backend.texts.tokenizer.encode("<|user|>long<|end|><|assistant|>")
    answer = thread.submit(GenerationRequest(prompt, max_tokens=2900), heard.append)
    thread.close()
    assert isinstance(heard[-1], Finished) and answer.finish is Finish.CANCELLED
    with pytest.raises(Busy):
        thread.submit(GenerationRequest(prompt), heard.append)


def test_a_call_between_steps_that_nobody_wants_any_more_is_not_made(tmp_path: Path) -> None:
    thread = EngineThread(scripted(tmp_path, script).engine, Limits())
    began, goes_on, made = threading.Event(), threading.Event(), list[str]()
    first = thread.between_steps(lambda: (began.set(), goes_on.wait(60)))
    assert began.wait(60)
    second = thread.between_steps(lambda: made.append("cancelled"))
    third = thread.between_steps(lambda: "after it")
    assert second.cancel()
    goes_on.set()
    assert first.result(60) and third.result(60) == "after it" and not made
    thread.close()


def test_sockets_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    with tcp_socket("127.0.0.1", 0) as first, pytest.raises(Busy, match="in use"):
        tcp_socket("127.0.0.1", first.getsockname()[1])
    for host in ("256.0.0.1.", "a..b", "a" * 64):
        with pytest.raises(UsageError, match="cannot resolve"):
            tcp_socket(host, 0)
    path = tmp_path / "run" / "kt.sock"
    with unix_socket(path), pytest.raises(Busy, match="already running"):
        unix_socket(path)
    with unix_socket(path):  # what a server that was killed left behind is replaced
        assert path.stat().st_mode & 0o777 == 0o600


def test_ollamas_port_is_listened_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [free_port(), free_port()]
    with serve_sockets.sockets_at("127.0.0.1", [*ports, ports[0]]) as listening:
        assert [each.getsockname()[1] for each in listening] == ports
        monkeypatch.setattr(serve_sockets, "OLLAMA_PORT", ports[1])
        with pytest.raises(Busy) as caught, serve_sockets.sockets_at("127.0.0.1", ports[1:]):
            pass
    assert "leave out --ollama" in (caught.value.hint or "")


def takes_signals(process: int) -> list[int]:
    """The threads of a process that do not block SIGTERM, those of libraries among them."""
    bit = 1 << (signal.SIGTERM - 1)
    states = dict[int, str]()
    for path in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states[int(path.name)] = (path / "status").read_text()
    masks = {
        each: int(state.partition("SigBlk:")[2].split()[0], 16) for each, state in states.items()
    }
    return [each for each, mask in masks.items() if not mask & bit]


def killed(process: int) -> None:
    """Ends the process of a descriptor; one that has ended stays so."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)


def test_the_command_serves_in_the_background_and_ends_at_a_signal(
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    command = ["serve", "kt-mini", "--port", str(port)]
    assert main([*command, "--background"]) == 0
    monkeypatch.delenv("KT_TILE_MIN", raising=False)  # with it a chat loads the model itself
    said = capsys.readouterr().err
    found = next(each for each in running_servers() if each.socket == socket_path(port))
    process = os.pidfd_open(found.pid)
    request.addfinalizer(lambda: killed(process))  # else chats of later tests would attach to it
    assert f"serving kt-mini at http://127.0.0.1:{port} (process {found.pid})" in said
    for words in (
        f"  page     http://127.0.0.1:{port}\n",
        f"  APIs     OpenAI http://127.0.0.1:{port}/v1, Anthropic",
        "  model    kt-mini",
        f"  context  {(found.status and found.status.context) or 0:,} tokens, for each of 4 ",
        "  memory   ",
        "tokens/s predicted for one conversation (kt plan kt-mini says why)",
    ):
        assert words in said
    assert os.getsid(found.pid) == found.pid
    answer = ask(Running(port, None), "What is kt?", max_tokens=9)  # type: ignore[arg-type]
    told = []
    for more in ([], ["--no-attach"], ["--threads", "1"]):
        words = [
            "chat",
            "kt-mini",
            "What is kt?",
            "-n",
            "9",
            "--seed",
            "3",
            "--temperature",
            "2",
            *more,
        ]
        assert main(words) == 0
        told.append(capsys.readouterr())
    assert len({each.out for each in told}) == 1
    assert "--threads applies only to a model loaded here" in told[2].err
    assert main(command) == Busy.exit_code
    assert f"a server of kt-mini already uses port {port}" in capsys.readouterr().err
    assert takes_signals(found.pid) == [found.pid]
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        os.killpg(found.pid, number)
    assert os.waitpid(found.pid, 0)[1] == 0
    log = log_path(port)
    said = log.read_text()
    assert answer.json()["choices"][0]["message"]["content"]
    assert "POST /v1/chat/completions 200" in said and "What is kt" not in said
    assert said.count("POST /engine/generate 200") == 1
    assert "GET " not in said  # what kt ps and chats ask
    assert said.endswith("the server has stopped\n") and log.stat().st_mode & 0o777 == 0o600
    assert (found.memory_bytes or 0) > 1 << 20 and not found.socket.exists()
    assert found.status and found.status.address == f"http://127.0.0.1:{port}"
    assert found.is_meant_by("kt-mini") and found.is_meant_by(str(port))


def test_the_socket_of_its_owner_needs_no_key(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "1.sock"
    model, rules = scripted(tmp_path, script), Rules(one_key("secret"))
    with unix_socket(path) as owners, running(model, rules, more=[owners]) as server:
        assert requests.get(f"{server.url}/server", timeout=60).status_code == 401
        with connected(path) as connection:
            status = status_of(connection)
    assert status is not None and (status.model, status.context) == ("fake", 4096)


LISTENS = """
import socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
made.listen()
print(flush=True)
while True:
    made.accept()
"""


def test_a_server_that_does_not_answer_is_listed_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    monkeypatch.setattr("ktcli.server.process.discovery.ANSWER_S", 0.5)
    path = socket_path(7)
    with unix_socket(path):
        pass  # what a server that was killed left behind is none
    assert main(["stop"]) == NotFound.exit_code and main(["stop", "--all"]) == 0
    path.unlink()
    command = [sys.executable, "-S", "-c", LISTENS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.readline()
            assert main(["ps"]) == 0 and main(["stop", "8"]) == NotFound.exit_code
            said = capsys.readouterr()
            assert "(loading)" in said.out and str(process.pid) in said.out
            assert "no running server matches '8'" in said.err
            assert main(["stop", "7"]) == 0
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()  # else a failure above would wait for it forever
    assert running_servers() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--api-key-file", "/nowhere"], "No such file"),
        (["--port", "0"], "--port"),
    ],
)
def test_the_command_refuses_before_it_loads(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "kt-mini", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    from ktcli.commands.cli.api_key import given_key

    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="other users can read"):
        given_key(None, file)
    file.chmod(0o600)
    assert given_key(None, file) == "secret"


def test_a_server_in_another_container_is_not_ended_from_here(tmp_path: Path) -> None:
    """The kernel says 0 where it has no name for the process here."""
    with pytest.raises(KtError, match="another container"):
        stop(FoundServer(tmp_path / "1.sock", 0, None, None))


def test_who_leaves_in_the_step_of_the_first_token_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although several answers were asked for, and the others wait for that token."""
    run, left = FakeEngine.run, threading.Event()
    with running(scripted(tmp_path, script)) as server:

        def leaving(engine: FakeEngine, batch: Batch) -> list[Logits]:
            rows = run(engine, batch)
            if rows and not left.is_set():
                left.set()
                assert server.serving is not None and server.serving.state is not None
                (generation,) = server.serving.state.answering.values()
                generation.cancel()
            return rows

        monkeypatch.setattr(FakeEngine, "run", leaving)
        assert ask(server, "long", n=3).ok and left.is_set()
        until(lambda: server.leases == 0)
