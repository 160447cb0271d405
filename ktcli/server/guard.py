"""Lets in only requests that may come in: from a page of this server or no page, with the key if there is one, and of
a bounded size and time.

A browser sends requests that any page makes, also to servers on this machine; a name that its page controls may even
lead here (DNS rebinding). So the names by which a loopback server is asked, and the origin of a page, are looked at.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ktcli.server.answering import App, Receive, Scope, Send
from ktcli.server.house import Rules
from ktcli.server.page.files import PATHS
from ktcli.server.refusal import Refusal

BODY_BYTES = 32 << 20
BODY_S = 30.0  # in which a body must be there
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = PATHS | {"/health"}  # that need no key

Refuse = Callable[[str, Refusal], tuple[bytes, dict[str, str]]]
Log = Callable[[dict[str, Any]], None]
NOTED = "kt.noted"  # the key of a scope under which handlers note what the log should say


class Guard:
    """An ASGI application before another one.

    Args:
        refuse: returns the body and headers of a refusal, for a path.
        log: called after each request with what is said of it; texts of clients are no part of that.
    """

    def __init__(self, app: App, rules: Rules, refuse: Refuse, log: Log) -> None:
        self._app, self._rules, self._refuse, self._log = app, rules, refuse, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, noted = time.monotonic(), scope.setdefault(NOTED, {})
        noted["status"] = 499  # unless something is sent, the client left before

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                noted["status"] = message["status"]
            await send(message)

        try:
            with suppress(Exception):  # starlette had it answered and told, and still raises it
                await self._answer(scope, receive, send_and_note)
        finally:
            client = (scope.get("client") or ("local",))[0]
            seconds = round(time.monotonic() - began_s, 4)
            about = {"client": client, "method": scope["method"], "path": scope["path"][:200]}
            self._log({**about, **noted, "seconds": seconds})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = _headers(scope)
            self._check(scope, headers)
            body = await _body(receive, headers)
        except Refusal as refusal:
            await self._send(scope, refusal, send)
            return
        if body is not None:
            await self._app(scope, _Replay(body, receive), send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises: Refusal."""
        rules, path = self._rules, scope["path"]
        if is_owner(scope):
            return
        host = _name(headers.get("host", ""))
        if rules.hosts and host not in rules.hosts:
            raise Refusal(
                403, f"this server is not asked by the name {host[:100]!r}", "", "bad_host"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            raise Refusal(
                403, f"pages of {origin[:100]!r} may not ask this server", "", "bad_origin"
            )
        if rules.key and path not in OPEN_PATHS and not _shows(headers, rules.key):
            raise Refusal(401, "the key is missing or wrong", "", "invalid_api_key")

    async def _send(self, scope: Scope, refusal: Refusal, send: Send) -> None:
        body, headers = self._refuse(scope["path"], refusal)
        # Whatever the client still sends is not read, so the connection cannot be used again.
        said = {**headers, "connection": "close", "content-length": str(len(body))}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in said.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


class _Replay:
    """Gives a body that was read already, and then what the client does next."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


async def _body(receive: Receive, headers: dict[str, str]) -> bytes | None:
    """The whole body; None: the client has gone.

    Raises:
        Refusal: it is too large or too slow.
    """
    said = headers.get("content-length", "")
    if said.isdecimal() and int(said[:12]) > BODY_BYTES:
        raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > BODY_BYTES:
                    raise _too_large()
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise Refusal(408, f"the body did not come in {BODY_S:.0f} s", "", "timeout") from error


def is_owner(scope: Scope) -> bool:
    """Tells whether a request came through the Unix socket, which only the server's owner can open: it has no port."""
    return (scope.get("server") or ("", 0))[1] is None


def _too_large() -> Refusal:
    return Refusal(
        413, f"the request has more than {BODY_BYTES >> 20} MiB", "", "request_too_large"
    )


def _headers(scope: Scope) -> dict[str, str]:
    """The headers by their names; of several of one name the first."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _shows(headers: dict[str, str], key: str) -> bool:
    """Tells whether a request shows the key; how long that takes says nothing about it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    shown = [
        hmac.compare_digest(said.encode(), key.encode())
        for said in (bearer, headers.get("x-api-key", ""))
    ]
    return any(shown)
