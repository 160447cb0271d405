"""Speaks with a running smg: its servers, whether it is ready, and what it counts. It is asked on this machine only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from urllib.parse import quote

import msgspec

from ktcli.client.address import ServerAddress
from ktcli.errors import KtError
from ktcli.records import dataclass
from ktcli.server.router.asking import HttpReply, ask, counters_of
from ktcli.server.router.counters import Counters
from ktcli.server.router.plan import RouterPlace

_POLL_S = 0.1
_ADD_S, _REMOVE_S = 30.0, 120.0  # in which a server is registered, and has finished its answers
_SHOWN = 300


class Worker(msgspec.Struct):
    """The address and state of a server in the list of smg.

    Attributes:
        status: "ready", "pending", "draining" and others.
    """

    id: str
    url: str
    status: str = ""
    is_healthy: bool = False
    load: int = 0


class _Workers(msgspec.Struct):
    workers: list[Worker]


class Readiness(msgspec.Struct):
    """The number of its servers that smg can use."""

    healthy_workers: int = 0


@dataclass(frozen=True, slots=True)
class SmgClient:
    """A client of a running smg.

    Attributes:
        place: where it listens.
        key: the control key.
    """

    place: RouterPlace
    key: str = field(repr=False, default="")

    @property
    def _address(self) -> ServerAddress:
        return ServerAddress("http", here(self.place.host), self.place.port)

    def readiness(self) -> Readiness | None:
        """Returns the number of servers that the router can use; None: the router does not respond."""
        try:
            reply = ask(self._address, "/readiness", answer_s=2.0)
            return msgspec.json.decode(reply.body, type=Readiness)
        except (KtError, msgspec.DecodeError):
            return None

    def workers(self) -> list[Worker]:
        """Returns the servers in the router's list, with their states. Raises: KtError: the router does not answer."""
        reply = self._asked("GET", "/workers")
        try:
            return msgspec.json.decode(reply.body, type=_Workers).workers
        except msgspec.DecodeError as error:
            raise KtError(f"the router's list of servers is malformed: {error}") from error

    def add(self, url: str, key: str = "") -> None:
        """Adds the server at `url` to the router, and waits until it is used.

        Args:
            key: the server's API key; empty: none.
        Raises:
            KtError: the router refuses the server, does not use it within half a minute, or does not answer.
        """
        self._asked("POST", "/workers", {"url": url, **({"api_key": key} if key else {})})
        self._wait(
            lambda workers: any(each.url == url and each.is_healthy for each in workers),
            _ADD_S,
            f"the router does not use {url} after {_ADD_S:.0f} s",
        )

    def remove(self, url: str) -> None:
        """Removes the server at `url` from the router, and waits until its answers have ended.

        Raises:
            KtError: the answers do not end within two minutes, or the router does not answer.
        """
        for each in self.workers():
            if each.url == url:
                self._asked("DELETE", f"/workers/{quote(each.id, safe='')}")
        self._wait(
            lambda workers: all(each.url != url for each in workers),
            _REMOVE_S,
            f"{url} still answers requests; it gets no new ones, and goes when it is done",
        )

    def _wait(self, is_done: Callable[[list[Worker]], bool], most_s: float, late: str) -> None:
        """Waits until its servers are as they should be. Raises: KtError: with `late`, after `most_s` seconds."""
        until = time.monotonic() + most_s
        while not is_done(self.workers()):
            if time.monotonic() > until:
                raise KtError(late)
            time.sleep(_POLL_S)

    def counters(self) -> Counters:
        """Returns the router's own Prometheus counters; none if it does not respond."""
        return counters_of(ServerAddress("http", "127.0.0.1", self.place.metrics_port))

    def _asked(self, method: str, path: str, body: Mapping[str, str] | None = None) -> HttpReply:
        try:
            reply = ask(self._address, path, self.key, method=method, body=body)
        except KtError as error:
            raise KtError("the router does not answer") from error
        if reply.status >= 400:
            said = reply.body.decode("utf-8", "replace")[:_SHOWN]
            raise KtError(f"the router refused {method} {path}: HTTP {reply.status} {said}")
        return reply


def here(host: str) -> str:
    """Returns the host by which this machine reaches a program of its own that listens at `host`: 127.0.0.1 for
    0.0.0.0."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
