"""`kt chat --server` beside kt's own server: the same answers as curl gets, and what routers ask of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from client.conftest import RemoteRun
from server.running import Running, running, scripted, serving_models
from server.sources import ScriptedModel
from server.test_drain import waiting
from waits import until

from ktcli.commands.serve import servers
from ktcli.commands.serve.lines import is_probe
from ktcli.errors import KtError
from ktcli.server.http.state import Rules
from ktcli.server.process import discovery
from ktcli.server.process.listening import unix_socket


def script(question: str) -> str:
    return "<think>hm</think>yes" if "think" in question else "z" * 20


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("own"), script)) as made:
        yield made


def curl(own: Running, question: str, **options: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": question}], **options}
    found = requests.post(f"{own.url}/v1/chat/completions", json=body, timeout=60).json()
    message: dict[str, Any] = found["choices"][0]["message"]
    return message


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--greedy", {"temperature": 0}),
        ("--temperature 1.5 --seed 7 -n 12", {"temperature": 1.5, "seed": 7, "max_tokens": 12}),
        ("--seed 8 --top-k 5", {"seed": 8, "top_k": 5}),
    ],
)
def test_the_same_answer_as_curl(
    words: str, options: dict[str, Any], own: Running, run: RemoteRun
) -> None:
    for question in ("hi there", "draw it", "think about it"):
        expected = curl(own, question, **options)
        code, out, _ = run(question, *words.split(), "--json", server=own.url)
        document = json.loads(out)
        assert code == 0 and document["text"] == expected["content"]
        assert document["thinking"] == expected.get("reasoning_content", "")


def test_a_server_that_ends_breaks_an_answer_off_with_an_error(
    tmp_path: Path, run: RemoteRun
) -> None:
    with waiting(tmp_path, drain_s=0.1) as (server, gate):

        def stop() -> None:
            assert gate.reached.wait(60)  # one letter was said
            server.serving.stop()  # type: ignore[union-attr]

        thread = threading.Thread(target=stop)
        thread.start()
        code, out, err = run("hi there", server=server.url)
        thread.join()
    assert code in (6, 7) and out == "1\n"
    assert "the server shut down before the answer was complete" in err


# --- what routers ask -------------------------------------------------------------------------------


def test_the_load_is_said_in_the_words_of_sglang(tmp_path: Path) -> None:
    with waiting(tmp_path, drain_s=5) as (server, gate):
        load = requests.get(f"{server.url}/loads?model=fake", timeout=60).json()["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (
            0,
            0,
            0,
        )
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with requests.post(
            f"{server.url}/v1/chat/completions", json=body, stream=True, timeout=60
        ) as reply:
            lines = reply.iter_lines()  # kept, since an iterator that goes closes the connection
            next(lines)
            until(lambda: server.residency.counts().running)
            said = requests.get(f"{server.url}/v1/loads?include=core,queues", timeout=60).json()
            load = said["loads"][0]
            assert said["dp_rank_count"] == 1 and said["timestamp"].startswith("20")
            assert load["num_running_reqs"] == load["num_total_reqs"] == 1
            assert load["max_running_requests"] == server.residency.limits.active
            gate.set()
            list(lines)
        info = requests.get(f"{server.url}/server_info", timeout=60).json()
    assert info["served_model_name"] == "fake" and info["context_length"] == 4096


@pytest.mark.parametrize(
    ("client", "request_", "status", "logged"),
    [("local", "GET /server", 200, False), ("10.0.0.1", "GET /server", 200, True),
     ("10.0.0.1", "GET /loads", 200, False), ("10.0.0.1", "GET /health", 503, True),
     ("10.0.0.1", "POST /health", 405, True), ("10.0.0.1", "GET /metrics", 200, True)],
)  # fmt: skip
def test_polls_fill_no_log(client: str, request_: str, status: int, logged: bool) -> None:
    method, path = request_.split()
    entry = {"client": client, "method": method, "path": path, "status": status}
    assert is_probe(entry) is not logged


def test_a_strict_server_lists_what_it_serves(tmp_path: Path) -> None:
    backend = scripted(tmp_path, script)
    models = [ScriptedModel(backend), ScriptedModel(replace(backend, name="b"))]
    for strict, names in ((False, ["fake", "mine", "b"]), (True, ["fake", "mine"])):
        rules = Rules(strict_model=strict, aliases=("mine",))
        with serving_models(models, rules) as server:
            rows = requests.get(f"{server.url}/v1/models", timeout=60).json()["data"]
            assert [row["id"] for row in rows] == names


def test_stop_says_how_long_answers_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.sock"
    with (
        unix_socket(path) as owners,
        running(scripted(tmp_path, script), Rules(drain_s=3), more=[owners]) as server,
    ):
        found = discovery.FoundServer(path, 1, None, None)
        discovery._set_drain(found, 120)
        with discovery.connected(path) as connection:
            status = discovery.status_of(connection)
        assert status is not None and status.drain_s == 120
        state = server.serving.state  # type: ignore[union-attr]
        assert state is not None and state.drain.seconds == 120
        # Others than its owner change nothing.
        reply = requests.post(f"{server.url}/server/drain", json={"seconds": 1}, timeout=60)
        assert reply.status_code == 404 and state.drain.seconds == 120
        with discovery.connected(path) as connection:
            body = discovery._body_of(connection, b"/server/drain", b'{"seconds": -1}')
        assert b"seconds" in body and state.drain.seconds == 120
    with pytest.raises(KtError, match="cannot be told how long answers may take"):
        discovery._set_drain(found, 1)
    asked: list[tuple[str, float | None]] = []
    monkeypatch.setattr(servers, "running_servers", lambda: [found])
    monkeypatch.setattr(servers, "end", lambda server, drain: asked.append((server.name, drain)))
    servers.stop(drain=60.0)
    servers.stop()
    assert asked == [("1", 60.0), ("1", None)]
