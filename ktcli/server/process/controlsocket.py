"""Answers at the Unix socket by which `kt ps` and `kt stop` find a program by others that kt keeps running.

Only its owner can open it, so no key is asked for.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from ktcli.errors import ExitCode, KtError
from ktcli.threads import Daemon

_TIMEOUT_S = 10.0
_BODY_BYTES = 1 << 16

Answer = Callable[[Any], Any]  # of the body: a value of JSON, None where there is none


class Refused(msgspec.Struct):
    """An error whose message is sent to the client."""

    message: str
    hint: str = ""
    code: int = int(ExitCode.FAILED)


def start_answering(listening: socket.socket, answers: Mapping[tuple[str, str], Answer]) -> None:
    """Starts a thread that answers HTTP requests at a Unix socket until the socket is closed.

    Args:
        listening: the socket; the caller closes it.
        answers: functions by method and path, such as ("GET", "/server"), which return the response; a KtError gets
            409, anything else 404.
    """
    handler = _handler(answers)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            Daemon(answer, connection, name="kt-control-answer").start()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_TIMEOUT_S)
            handler(connection, ("local", 0), None)

    Daemon(accept, name="kt-control").start()


def _handler(answers: Mapping[tuple[str, str], Answer]) -> Callable[..., BaseHTTPRequestHandler]:
    """Returns the class that handles one request."""

    class ControlHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send()

        do_POST = do_DELETE = do_GET

        def _send(self) -> None:
            """Sends what an answer returns, or the error that it raises; 404 where there is none."""
            answer = answers.get((self.command, self.path))
            status, reply = 404, None
            if answer is not None:
                try:
                    status, reply = 200, answer(self._body())
                except KtError as error:
                    status, reply = 409, Refused(str(error), error.hint, int(error.exit_code))
            body = msgspec.json.encode(reply)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> Any:
            length = self.headers.get("Content-Length", "0")
            size = int(length) if length.isdecimal() else 0
            try:
                return msgspec.json.decode(self.rfile.read(min(size, _BODY_BYTES)))
            except msgspec.DecodeError:
                return None

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing: these are kt's own questions."""

    return ControlHandler
