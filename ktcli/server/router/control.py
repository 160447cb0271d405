"""The Unix socket of a router: `kt ps` and `kt stop` find it there as they find servers, and `kt route` asks it for its
status and to add and remove servers. Only its owner can open it, so no key is asked for.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from ktcli.errors import UsageError
from ktcli.server.process.controlsocket import start_answering
from ktcli.server.process.discovery import Status
from ktcli.server.router.address import address_of
from ktcli.server.router.status import RouterStatus, status_of_router
from ktcli.server.router.supervision import RouterSupervisor

STATUS, SERVER, SERVERS = "/router", "/server", "/servers"


class ServerChange(msgspec.Struct):
    """A request to add or remove the server at an address."""

    url: str


def answer_at(listening: socket.socket, router: RouterSupervisor) -> None:
    """Starts to answer requests for a router's status, and to change its servers, at a socket, until the socket is
    closed.
    """
    answers = {
        ("GET", SERVER): lambda _: server_status(router),
        ("GET", STATUS): lambda _: status_of_router(router),
        ("POST", SERVERS): lambda body: _added(router, _change(body)),
        ("DELETE", SERVERS): lambda body: _removed(router, _change(body)),
    }
    start_answering(listening, answers)


def _change(body: Any) -> ServerChange:
    try:
        return msgspec.convert(body, ServerChange)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request names no server: {error}") from None


def server_status(router: RouterSupervisor) -> Status:
    """Returns the status of a router for `kt ps`."""
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
