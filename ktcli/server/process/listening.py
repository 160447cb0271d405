"""Opens the sockets of a server, and gives connections deadlines."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ktcli.errors import Busy, KtError, UsageError
from ktcli.server.http.guard import Guard
from ktcli.server.process.discovery import connected, short_name
from ktcli.store.places import private_run_folder

# In which a request's headers must be there, from the first byte or the connection on.
HEAD_S = 15.0
IDLE_S = 75.0  # that a connection stays open between two requests
_BACKLOG = 1024


class Connection(H11Protocol):
    """A connection that is closed when its headers do not arrive in time; uvicorn itself waits for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Handles a new connection: starts the deadline of its first request's headers."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of a connection: cancels its deadline."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes; cancels the deadline inside a request, and starts one for the next headers."""
        super().data_received(data)
        if self._in_request:
            self._forget()
        elif self._deadline is None:
            self._wait_for_head()  # the next request has begun

    def send_400_response(self, msg: str) -> None:
        """Sends 400 to a client whose bytes are not an HTTP request, and logs its address."""
        if isinstance(self.app, Guard):
            self.app.malformed(self.client)
        super().send_400_response(msg)

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if not self._in_request and self.transport is not None:
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def tcp_socket(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens at an address.

    Raises:
        UsageError: the address does not exist or may not be used. Busy: another program listens there.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: no name has such a part
        why = getattr(error, "strerror", None) or "there is no such host"
        raise UsageError(f"--host: cannot resolve {host[:100]!r}: {why}") from error
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise Busy(
                f"port {port} on {host} is already in use by another program",
                hint=f"choose another one: kt serve --port {port + 1 if port < 65535 else 8000}",
            ) from error
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return made


def unix_socket(path: Path) -> socket.socket:
    """Returns a listening Unix socket that only its owner can open; a stale socket at `path` is replaced.

    Raises:
        Busy: a server listens there. KtError: it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_run_folder()
        if _answers(path):
            raise Busy(
                f"a server of this library is already running on this port (its socket is {path})",
                hint="kt ps shows it; kt stop stops it",
            )
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with short_name(path) as name:
                made.bind(name)
        finally:
            os.umask(before)
        made.listen(_BACKLOG)
        return made
    except OSError as error:
        raise KtError(f"cannot create the socket {path}: {error.strerror or error}") from error


def _answers(path: Path) -> bool:
    try:
        with connected(path):
            return True
    except OSError:
        return False
