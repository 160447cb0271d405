"""A server that is told to end lets answers finish, takes no more, and cuts off what takes too long with an error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from chat.fake_engine import VOCAB
from server.running import Running, running, scripted
from waits import until

from ktcli.server.http.state import Rules

WORDS = "12345678"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x", "max_tokens": 400},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}]},
}


class Gate(threading.Event):
    """An event for which somebody waits once `reached` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


@contextmanager
def waiting(folder: Path, drain_s: float) -> Iterator[tuple[Running, Gate]]:
    """A server whose answers say one letter and go on when an event is set."""
    backend, gate = scripted(folder, lambda question: WORDS), Gate()
    engine: Any = backend.engine
    letters = [engine.tokenizer.encode(letter)[0] for letter in WORDS]
    end = engine.tokenizer.id_of("<|end|>")

    def logits(cache: list[int]) -> np.ndarray:
        said = sum(id in letters for id in cache[-len(WORDS) :])
        if said == 1:
            assert gate.wait(60)
        out = np.full(VOCAB, -10, dtype=np.float32)
        out[end if said == len(WORDS) else letters[said]] = 10
        return out

    engine.logits = logits
    with running(backend, Rules(drain_s=drain_s)) as server:
        try:
            yield server, gate
        finally:
            gate.set()


def _stop(server: Running) -> None:
    assert server.serving is not None
    server.serving.stop()


def begun(server: Running, path: str, **more: Any) -> requests.Response:
    """A stream of which something has come."""
    answer = requests.post(
        server.url + path, json={**STREAMS[path], "stream": True, **more}, stream=True, timeout=60
    )
    assert answer.status_code == 200
    return answer


def test_answers_finish_while_nothing_new_is_let_in(tmp_path: Path) -> None:
    with waiting(tmp_path, drain_s=30) as (server, gate):
        stream = begun(server, "/v1/chat/completions")
        lines = stream.iter_lines()
        assert next(line for line in lines if b'"content":"1"' in line)
        _stop(server)
        health = requests.get(f"{server.url}/health", timeout=60)
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        for path, body in STREAMS.items():
            refused = requests.post(server.url + path, json=body, timeout=60)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 30
            assert "accepts no new requests" in refused.text
        gate.set()
        rest = b"\n".join(lines)
        assert b'"finish_reason":"stop"' in rest and rest.rstrip().endswith(b"[DONE]")


@pytest.mark.parametrize("path", STREAMS)
def test_what_takes_too_long_ends_with_its_apis_error(path: str, tmp_path: Path) -> None:
    with waiting(tmp_path, drain_s=0.2) as (server, _):
        stream = begun(server, path)
        lines = stream.iter_lines()
        next(lines)
        _stop(server)
        rest = b"\n".join(lines).decode()
    assert "the server shut down before the answer was complete" in rest
    assert "Traceback" not in rest
    events = [
        line.removeprefix("data: ") for line in rest.splitlines() if "the server shut down" in line
    ]
    assert all(json.loads(event) for event in events)


def test_a_body_that_never_ends_is_answered_when_the_server_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(scripted(tmp_path, lambda question: "yes"), Rules(drain_s=0.1)) as server:
        assert server.serving is not None and server.serving._server is not None
        state = server.serving._server.server_state
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
        with client:
            client.sendall(head + b'{"')
            until(lambda: state.tasks)
            _stop(server)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 503") and b"the server shut down" in answer
    assert "Exception in ASGI" not in caplog.text


def test_an_answer_in_one_piece_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    with waiting(tmp_path, drain_s=0.2) as (server, _):
        found: list[requests.Response] = []
        body = STREAMS["/v1/chat/completions"]
        ask = lambda: found.append(  # noqa: E731
            requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        )
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: server.residency.counts()[0] > 0)
        _stop(server)
        asking.join()
    assert found[0].status_code == 503 and found[0].json()["error"]["code"] == "server_draining"
