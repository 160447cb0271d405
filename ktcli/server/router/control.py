"""The Unix socket of a router: `kt ps` and `kt stop` find it there as they find servers, and `kt route` asks it for its
status and to add and remove servers. Only its owner can open it, so no key is asked for.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from ktcli.client.address import ServerAddress
from ktcli.errors import ExitCode, KtError, NotFound, UsageError
from ktcli.server.process.controlsocket import Refused, start_answering
from ktcli.server.process.discovery import Status, connected, socket_path
from ktcli.server.router.address import address_of
from ktcli.server.router.status import RouterStatus, status_of_router
from ktcli.server.router.supervision import RouterSupervisor

STATUS, SERVER, SERVERS = "/router", "/server", "/servers"


class ServerChange(msgspec.Struct):
    """A request to add or remove the server at an address."""

    url: str


def answer_at(listening: socket.socket, router: RouterSupervisor) -> None:
    """Starts to answer requests at a Unix socket that ask for a router's status or change its servers, until the socket
    is closed."""
    answers = {
        ("GET", SERVER): lambda _: server_status(router),
        ("GET", STATUS): lambda _: status_of_router(router),
        ("POST", SERVERS): lambda body: _changed(router, router.add, body),
        ("DELETE", SERVERS): lambda body: _changed(router, router.remove, body),
    }
    start_answering(listening, answers)


def server_status(router: RouterSupervisor) -> Status:
    """Returns the report of a router to `kt ps`: its model, its address and context, and the servers that it routes
    to."""
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


def _changed(
    router: RouterSupervisor, change: Callable[[ServerAddress], object], body: Any
) -> RouterStatus:
    """Returns the status of a router after a change with the server that a request names."""
    try:
        named = msgspec.convert(body, ServerChange)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request names no server: {error}") from None
    change(address_of(named.url))
    return status_of_router(router)


_ANSWER_S = 180.0  # a server that is removed finishes its answers first


class _UnixConnection(HTTPConnection):
    """A connection of HTTP over a Unix socket."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self.sock = made


def status(port: int) -> RouterStatus:
    """Returns the state and the counts of the router on a port, asked through its Unix socket.

    Raises:
        NotFound: no router runs there. KtError: the router does not answer.
    """
    return _asked(port, "GET", STATUS)


def change(port: int, address: ServerAddress, *, adds: bool) -> RouterStatus:
    """Adds a server to the router on a port, or removes one; returns the router's new status.

    Raises:
        NotFound: no router runs there. KtError: the router refuses the change; the error has its reason.
    """
    return _asked(port, "POST" if adds else "DELETE", SERVERS, ServerChange(address.url))


def _asked(port: int, method: str, path: str, body: Any = None) -> RouterStatus:
    data = None if body is None else msgspec.json.encode(body)
    with contextlib.ExitStack() as held:
        try:
            made = held.enter_context(connected(socket_path(port)))
        except OSError:
            raise NotFound(
                f"no router of this library runs on port {port}",
                hint="kt ps lists what runs; kt route URL... starts a router, --port names another one",
            ) from None
        try:
            made.settimeout(_ANSWER_S)
            connection = _UnixConnection(made)
            connection.request(method, path, data)
            reply = connection.getresponse()
            status, said = reply.status, reply.read()
        except (OSError, HTTPException) as error:
            why = str(error) or type(error).__name__
            raise KtError(f"the router on port {port} does not answer: {why}") from error
    return _read(port, status, said)


def _read(port: int, status: int, said: bytes) -> RouterStatus:
    try:
        if status == 200:
            return msgspec.json.decode(said, type=RouterStatus)
        if status == 409:
            refused = msgspec.json.decode(said, type=Refused)
            error = KtError(refused.message, hint=refused.hint)
            codes = {int(each): each for each in ExitCode}
            error.exit_code = codes.get(refused.code, ExitCode.FAILED)
            raise error
    except (msgspec.DecodeError, ValueError) as error:
        raise KtError(f"the router on port {port} runs another version of kt ({error})") from error
    raise NotFound(
        f"what runs on port {port} is not a router", hint="kt ps lists the servers and routers"
    )
