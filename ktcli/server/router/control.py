"""The Unix socket of a router: `kt ps` and `kt stop` find it there as they find servers, and `kt route` asks it for its
status and to add and remove servers. Only its owner can open it, so no key is asked for.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from ktcli.errors import ExitCode, KtError
from ktcli.server.process.discovery import Status
from ktcli.server.router.address import address_of
from ktcli.server.router.status import RouterStatus, status_of_router
from ktcli.server.router.supervision import RouterSupervisor
from ktcli.threads import Daemon

STATUS, SERVER, SERVERS = "/router", "/server", "/servers"
_TIMEOUT_S = 10.0
_BODY_BYTES = 1 << 16


class ServerChange(msgspec.Struct):
    """A request to add or remove the server at an address."""

    url: str


class Refused(msgspec.Struct):
    """An error, as whoever asked is told it."""

    message: str
    hint: str = ""
    code: int = int(ExitCode.FAILED)


class ControlSocket:
    """Answers at a Unix socket while a router runs.

    Args:
        listening: the socket, which whoever made it closes.
    """

    def __init__(self, listening: socket.socket, router: RouterSupervisor) -> None:
        self._listening, self._router = listening, router

    def start(self) -> None:
        """Begins to answer, until the socket is closed."""
        Daemon(self._accept, name="kt-control").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            Daemon(self._answer, connection, name="kt-control-answer").start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_TIMEOUT_S)
            handler = _handler(self._router)
            handler(connection, ("local", 0), None)


def _handler(router: RouterSupervisor) -> Callable[..., BaseHTTPRequestHandler]:
    """Returns the class that handles one request to a router."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Callable[[], Any]] = {
                SERVER: lambda: server_status(router),
                STATUS: lambda: status_of_router(router),
            }
            self._send(answers.get(self.path))

        def do_POST(self) -> None:
            change = self._change()
            self._send(None if change is None else lambda: _added(router, change))

        def do_DELETE(self) -> None:
            change = self._change()
            self._send(None if change is None else lambda: _removed(router, change))

        def _change(self) -> ServerChange | None:
            length = self.headers.get("Content-Length", "0")
            size = int(length) if length.isdecimal() else 0
            if self.path != SERVERS or not 0 < size <= _BODY_BYTES:
                return None
            try:
                return msgspec.json.decode(self.rfile.read(size), type=ServerChange)
            except msgspec.DecodeError:
                return None

        def _send(self, answer: Callable[[], Any] | None) -> None:
            """Sends what an answer returns, or the error that it raises; 404 where there is none."""
            status, said = 404, None
            if answer is not None:
                try:
                    status, said = 200, answer()
                except KtError as error:
                    status, said = 409, Refused(str(error), error.hint, int(error.exit_code))
            body = msgspec.json.encode(said)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing: these are kt's own questions."""

    return Handler


def server_status(router: RouterSupervisor) -> Status:
    """Returns what `kt ps` shows of a router."""
    settings = router.settings
    first = router.servers[0]
    return Status(
        settings.model,
        address=settings.place.url,
        context=first.context or 0,
        since=router.since,
        drain_s=settings.place.drain_s,
        servers=[each.url for each in router.servers],
    )


def _added(router: RouterSupervisor, change: ServerChange) -> RouterStatus:
    router.add(address_of(change.url))
    return status_of_router(router)


def _removed(router: RouterSupervisor, change: ServerChange) -> RouterStatus:
    router.remove(address_of(change.url))
    return status_of_router(router)
