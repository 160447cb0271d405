"""What fails behind a router while one of two servers is killed, drained, started again or answers errors: route.py."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from routed import Asked, ask, free_port, router, server

FAULT_S, HEALTH_S = 12.0, 60.0


class Load:
    """Requests of four clients without pause, until it is told to end."""

    def __init__(self, port: int) -> None:
        self.found: list[tuple[float, Asked]] = []
        self._port, self._ends, self._number = port, threading.Event(), count()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        while not self._ends.is_set():
            words = [{"role": "user", "content": f"{next(self._number)} is a number"}]
            asked, _ = ask(self._port, words, 8)
            self.found.append((time.monotonic(), asked))

    def failed(self) -> int:
        """The requests that got no answer."""
        return sum(each.status != 200 for _, each in self.found)

    def first_of(self, url: str, after: float) -> float | None:
        """When a server first answered after a moment."""
        return next((at for at, each in self.found if at > after and each.server == url), None)


class Sick(BaseHTTPRequestHandler):
    """A server that answers chats with whatever status it is told to, and everything else as kt serve does."""

    status = 500

    def do_GET(self) -> None:
        rows = [{"id": "kt-mini", "object": "model", "max_model_len": 2048}]
        said = {"data": rows} if self.path == "/v1/models" else {"status": "ok"}
        self._send(200 if self.path in ("/v1/models", "/health") else 404, said)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.status == 0:  # a reset
            linger = b"\x01\0\0\0\0\0\0\0"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            return
        self._send(self.status, {"error": {"message": "no"}})

    def _send(self, status: int, said: Any) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server in a thread."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made.server_port
        finally:
            made.shutdown()
            thread.join()


def health(port: int) -> bool:
    """Whether a server says that it is well."""
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False


def measure_faults() -> list[dict[str, Any]]:
    """What fails under load while something happens to one of two servers."""
    rows = []
    for name, number in (
        ("SIGKILL, start again", signal.SIGKILL),
        ("drain, start again", signal.SIGTERM),
    ):
        rows.append({"fault": name, **_ended(number)})
        print(rows[-1], flush=True)
    for name, status in (("500", 500), ("503", 503), ("resets", 0)):
        rows.append({"fault": name, **_sick(status)})
        print(rows[-1], flush=True)
    return rows


def _ended(number: signal.Signals) -> dict[str, Any]:
    one, two, port = (free_port() for _ in range(3))
    url = f"http://127.0.0.1:{two}"
    with ExitStack() as held:
        held.enter_context(server(one))
        with server(two) as child:
            held.enter_context(router(one, two, port=port))
            load = held.enter_context(Load(port))
            time.sleep(FAULT_S / 4)
            child.send_signal(number)
            child.wait()
        gone = time.monotonic()
        time.sleep(FAULT_S / 2)
        held.enter_context(server(two))
        while not health(two):
            time.sleep(0.02)
        well = time.monotonic()
        until = well + HEALTH_S
        while load.first_of(url, well) is None and time.monotonic() < until:
            time.sleep(0.05)
        again = load.first_of(url, gone)
        time.sleep(1.0)
        count_all = len(load.found)
        return {
            "requests": count_all,
            "failed": load.failed(),
            "used_again_s": None if again is None else max(0.0, again - well),
        }


def _sick(status: int) -> dict[str, Any]:
    one, port = free_port(), free_port()
    handler = type("SickServer", (Sick,), {"status": status})
    with server(one), serving(handler) as two, router(one, two, port=port), Load(port) as load:
        time.sleep(FAULT_S / 2)
        return {"requests": len(load.found), "failed": load.failed(), "used_again_s": None}
