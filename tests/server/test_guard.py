"""What is no proper request, or comes from a page elsewhere, is refused before anything is made of it."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from server.running import Running, running, scripted
from waits import until

from ktcli.commands.serve.lines import LibraryLog, log_request
from ktcli.errors import UsageError
from ktcli.output import Mode, out
from ktcli.server.http import body
from ktcli.server.http.access import LOOPBACK
from ktcli.server.http.state import Rules

LOGGED: list[dict[str, Any]] = []
PATH = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = scripted(tmp_path_factory.mktemp("model"), lambda question: "yes")
    with running(model, Rules(hosts=LOOPBACK), log=LOGGED.append) as found:
        yield found


def said(server: Running, data: bytes) -> bytes:
    """All that is answered until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(10)
        client.sendall(data)
        found = b""
        while more := client.recv(1 << 16):
            found += more
    return found


def logged(server: Running) -> dict[str, Any]:
    until(lambda: bool(LOGGED))
    return LOGGED.pop()


def forget(count: int = 1) -> None:
    """Waits for the entries of a test's requests, and forgets them: they are made once the answer was sent."""
    until(lambda: len(LOGGED) >= count)
    LOGGED.clear()


@pytest.mark.parametrize(
    "host",
    [
        "localhost:x@evil.example",
        "user@localhost",
        "localhost:80:80",
        "localhost:",
        "localhost:65536",
        "localhost:-1",
        "localhost:8_0",
        "localhost /",
        "local host",
        "localhost,evil.example",
        "localhost/evil",
        "localhost?x",
        "localhost#x",
        "[::1",
        "[::1]x",
        "[localhost]",
        "::1",
        "http://localhost",
        "",
    ],
)
def test_a_malformed_host_is_no_host(server: Running, host: str) -> None:
    answer = said(server, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert logged(server)["client"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LocalHost:80", 200), ("[::1]:80", 200), ("evil.example", 403)],
)
def test_a_host_is_compared_without_its_port(server: Running, host: str, status: int) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert said(server, head.encode()).startswith(b"HTTP/1.1 %d" % status)
    forget()


def test_several_hosts_are_none(server: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert said(server, head).startswith(b"HTTP/1.1 400")
    forget()


def test_two_ends_of_a_body_close_the_connection(server: Running) -> None:
    """What a proxy takes for the rest of the body would be the next request."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = said(server, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    forget()


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-origin", 200), ("same-site", 200), ("none", 200)],
)
def test_a_page_of_another_site_posts_nothing(server: Running, site: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site}
    assert requests.post(server.url + PATH, BODY, headers=headers, timeout=60).status_code == status
    assert requests.get(server.url + "/health", headers=headers, timeout=60).ok  # a link
    forget(2)


@pytest.mark.parametrize("origin", ["http://[", "//localhost", "http://evil@localhost"])
def test_an_origin_that_is_none_is_another_one(server: Running, origin: str) -> None:
    headers = {"Origin": origin}
    assert requests.post(server.url + PATH, BODY, headers=headers, timeout=60).status_code == 403
    forget()


def test_a_path_writes_no_line_of_its_own(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "mode", Mode.HUMAN)
    path = "/%0a127.0.0.1%20POST%20/x%1b%5d52;c;eA==%07%7f%c2%9b%e2%80%ae%ed%b0%80%0d"
    assert said(server, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    entry = logged(server)
    assert entry["path"].isprintable() and "\\n127.0.0.1 POST /x\\x1b]52" in entry["path"]
    log_request(entry)
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_request_is_logged_with_its_sender(server: Running) -> None:
    assert said(server, b"\x16\x03\x01\x00\xa5\r\n\r\n").startswith(b"HTTP/1.1 400")
    entry = logged(server)
    assert (entry["client"], entry["status"]) == ("127.0.0.1", 400)


def test_a_log_for_programs_is_json_throughout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out, "logs_json", True)
    monkeypatch.setattr(out, "mode", Mode.HUMAN)
    out.note("serving\nkt")
    out.warn("slow\x7f", hint="wait")
    out.error(UsageError("no", hint="yes"))
    out.record({"path": "/\x9b"})
    handler = LibraryLog()
    handler.emit(logging.makeLogRecord({"msg": "Invalid\n%s", "args": ("request",)}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(each.isprintable() for each in lines)
    levels = [json.loads(each).get("level") for each in lines]
    assert levels == ["info", "warning", "error", None, "warning"]
    assert all(json.loads(each)["time"] > 0 for each in lines)


def test_unfinished_bodies_are_bounded_together(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "ALL_BYTES", 1 << 20)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n".encode()
    clients = []
    part = b" " * (body.FREE_BYTES + (300 << 10))
    for _ in range(3):  # 900 KiB count
        clients.append(socket.create_connection(("127.0.0.1", server.port)))
        clients[-1].sendall(head + part)
    assert server.serving is not None and server.serving._server is not None
    guard: Any = server.serving._server.config.loaded_app
    until(lambda: guard._bodies.taken_bytes == 900 << 10)
    LOGGED.clear()
    large = b" " * (body.FREE_BYTES + (200 << 10)) + BODY
    answer = requests.post(server.url + PATH, large, timeout=60)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert logged(server)["client"] == "127.0.0.1"
    assert requests.post(server.url + PATH, BODY, timeout=60).ok  # a small one comes in
    for client in clients:
        client.close()
    until(lambda: guard._bodies.taken_bytes == 0)
    assert requests.post(server.url + PATH, large, timeout=60).ok
    assert guard._bodies.taken_bytes == 0
