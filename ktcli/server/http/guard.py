"""Lets in only requests that may come in: from a page of this server or no page, with the key if there is one, and of
a bounded size and time.

A browser sends requests that any page makes, also to servers on this machine; a name that its page controls may even
lead here (DNS rebinding). So the names by which a loopback server is asked, and the origin of a page, are looked at.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from ktcli.server.http.answering import App, Receive, Scope, Send
from ktcli.server.http.bodies import PLACE, Bodies, BodyPlace
from ktcli.server.http.body import BODY
from ktcli.server.http.page.files import PATHS
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import Rules
from ktcli.server.process.drain import Drain, cut_off

BODY_BYTES = 16 << 20
BODY_S = 30.0  # in which a body must be there
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = PATHS | {"/health"}  # that need no key
PORT_MOST = 65535
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # which change nothing
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z._-]+))(?::(?P<port>[0-9]{1,5}))?"
)

Refuse = Callable[[str, Refusal], tuple[bytes, dict[str, str]]]
Log = Callable[[dict[str, Any]], None]
NOTED = "kt.noted"  # the key of a scope under which handlers note what the log should say


class Guard:
    """An ASGI application before another one.

    Args:
        drain: counts the requests that are being answered, and lets no more in once the server is to end.
        refuse: returns the body and headers of a refusal, for a path.
        log: called after each request with what is said of it; texts of clients are no part of that.
    """

    def __init__(self, app: App, rules: Rules, drain: Drain, refuse: Refuse, log: Log) -> None:
        self._app, self._rules, self._refuse, self._log = app, rules, refuse, log
        self._drain = drain
        self._bodies = Bodies()

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
            # starlette has had errors answered and told, and still raises them
            with suppress(Exception), self._bodies.place() as place:
                scope[PLACE] = place
                await self._answer(scope, receive, send_and_note)
        finally:
            about = {"method": scope["method"], "path": _plain(scope["path"][:200]), **noted}
            self._tell(scope.get("client"), about, began_s)

    def malformed(self, client: tuple[str, int] | None) -> None:
        """Logs that what a client sent was no request."""
        self._tell(client, {"method": "?", "path": "?", "status": 400}, time.monotonic())

    def _tell(self, client: tuple[str, int] | None, about: dict[str, Any], began_s: float) -> None:
        seconds = round(time.monotonic() - began_s, 4)
        self._log({"client": (client or ("local",))[0], **about, "seconds": seconds})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = _headers(scope)
            self._check(scope, headers)
            self._drain.require_running(scope["path"])
            scope[BODY] = await _body(receive, headers, scope[PLACE])
            with self._drain.answering(scope["path"]):
                if scope[BODY] is not None:
                    await self._app(scope, receive, send)
            return
        except Refusal as error:
            refusal = error.with_traceback(None)  # which holds what was received
        except asyncio.CancelledError:
            if not self._drain.begun or BODY in scope:
                raise
            refusal = cut_off()  # the server ends before the body was there
        await self._send(scope, refusal, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raises: Refusal."""
        rules, path = self._rules, scope["path"]
        if "content-length" in headers and "transfer-encoding" in headers:
            said = "Content-Length and Transfer-Encoding contradict each other"
            raise Refusal(400, said, "", "bad_request")
        host = _name(headers.get("host"))
        if is_owner(scope):
            return
        if rules.hosts and host not in rules.hosts:
            raise Refusal(
                403, f"this server is not asked by the name {host[:100]!r}", "", "bad_host"
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            raise Refusal(
                403, f"pages of {origin[:100]!r} may not ask this server", "", "bad_origin"
            )
        if scope["method"] not in _SAFE and headers.get("sec-fetch-site") == "cross-site":
            raise Refusal(403, "pages of another site may not ask this server", "", "bad_origin")
        if rules.key and path not in OPEN_PATHS and not _shows(headers, rules.key):
            raise Refusal(401, "the key is missing or wrong", "", "invalid_api_key")

    async def _send(self, scope: Scope, refusal: Refusal, send: Send) -> None:
        body, headers = self._refuse(scope["path"], refusal)
        # Whatever the client still sends is not read, so the connection cannot be used again.
        said = {**headers, "connection": "close", "content-length": str(len(body))}
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in said.items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive, headers: dict[str, str], place: BodyPlace) -> bytes | None:
    """The whole body; None: the client has gone.

    Raises:
        Refusal: it is too large or too slow, or there is no room for it now.
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
                place.grow(size)
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


def _name(host: str | None) -> str:
    """The name by which a server is asked, without the port; empty: HTTP/1.0 needs none.

    Raises:
        Refusal: the header is malformed.
    """
    if host is None:
        return ""
    found = _HOST.fullmatch(host)
    if found is None or int(found["port"] or 0) > PORT_MOST:
        raise Refusal(400, f"the Host header {host[:100]!r} is malformed", "", "bad_host")
    return (found["v6"] or found["name"]).lower()


def _plain(text: str) -> str:
    """A text on one line, in which a log's reader obeys nothing: what is not printable is escaped."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def _shows(headers: dict[str, str], key: str) -> bool:
    """Tells whether a request shows the key; how long that takes says nothing about it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    shown = [
        hmac.compare_digest(said.encode(), key.encode())
        for said in (bearer, headers.get("x-api-key", ""))
    ]
    return any(shown)
