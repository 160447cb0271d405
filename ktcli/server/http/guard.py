"""Checks requests before any handler sees them: Host and Origin, the API key, and the size and time of the body.

A browser sends requests that any page makes, also to servers on this machine; a name that its page controls may even
resolve to here (DNS rebinding). So the Host of requests to a loopback server, and the Origin of a page, are checked.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from ktcli.server.http.access import (
    host_name,
    is_allowed,
    is_loopback,
    is_preflight,
    origin_headers,
    preflight_headers,
)
from ktcli.server.http.answering import NOTED, App, Receive, Scope, Send
from ktcli.server.http.body import BODY, BYTE_ORDER_MARK, RESERVATION, Bodies, BodyReservation
from ktcli.server.http.keys import ApiKeys
from ktcli.server.http.page.files import PATHS
from ktcli.server.http.refusals import Refusal, no_path
from ktcli.server.http.state import KEY_NAME, Rules
from ktcli.server.process.drain import Drain, cut_off
from ktcli.server.tracing.spans import Trace

BODY_BYTES = 16 << 20
BODY_S = 30.0  # in which a body must have arrived
OPEN_PATHS = PATHS | {"/health"}  # which need no API key
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # which change nothing
_ID = re.compile(r"[!-~]{1,128}")

Refuse = Callable[[str, Refusal], tuple[bytes, dict[str, str]]]
Log = Callable[[dict[str, Any]], None]
REQUEST_ID = "x-request-id"
_ANTHROPIC_ID = b"request-id"  # where Anthropic's clients look for it


class Guard:
    """ASGI middleware that refuses requests, and logs each of them.

    Args:
        drain: counts the requests in progress, and accepts no more once the server shuts down.
        refuse: returns the body and headers of an error response, given a path.
        log: called after each request with its log entry, which has no text of a client in it.
        trace: called after each request with its scope, and when it began; None: nobody traces requests.
    """

    def __init__(
        self,
        app: App,
        rules: Rules,
        drain: Drain,
        refuse: Refuse,
        log: Log,
        trace: Trace | None = None,
    ) -> None:
        self._app, self._rules, self._refuse, self._log = app, rules, refuse, log
        self._drain, self._trace = drain, trace
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, noted = time.monotonic(), scope.setdefault(NOTED, {})
        noted["status"] = 499  # unless something is sent, the client left before

        asked = scope["path"]
        scope["path"] = meant_path(asked, self._rules.root_path)
        headers = Headers(scope=scope)
        added = self._added_headers(headers)

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                noted["status"] = message["status"]
                message = {**message, "headers": _with_headers(message.get("headers", ()), added)}
                id = noted["request_id"] = _request_id(message["headers"])
                if scope["path"].startswith("/v1/messages"):
                    message["headers"].append((_ANTHROPIC_ID, id.encode("latin-1")))
            await send(message)

        try:
            # starlette has answered errors, and still raises them
            with suppress(Exception), self._bodies.reservation() as reservation:
                scope[RESERVATION] = reservation
                await self._answer(scope, headers, receive, send_and_note)
        finally:
            about = {"method": scope["method"], "path": _plain(asked[:200]), **noted}
            self._tell(scope.get("client"), about, began_s)
            if self._trace is not None:
                self._trace(scope, began_s)

    def malformed(self, client: tuple[str, int] | None) -> None:
        """Writes an entry with the status 400 to the log of requests: a client sent something that is not HTTP."""
        self._tell(client, {"method": "?", "path": "?", "status": 400}, time.monotonic())

    def _tell(self, client: tuple[str, int] | None, about: dict[str, Any], began_s: float) -> None:
        seconds = round(time.monotonic() - began_s, 4)
        self._log({"client": (client or ("local",))[0], **about, "seconds": seconds})

    def _added_headers(self, headers: Headers) -> dict[str, str]:
        """Returns what the response has beside the headers of its handler: the client's own id of the request, and
        what lets the page that sent it read the answer."""
        id, origin = headers.get(REQUEST_ID, ""), headers.get("origin")
        found = {REQUEST_ID: id} if _ID.fullmatch(id) else {}
        if origin is not None and is_allowed(origin, self._rules.origins):
            found |= origin_headers(origin)
        return found

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check(scope, headers)
            if is_preflight(scope["method"], headers) and "origin" in headers:
                await _send_preflight(headers, send)
                return
            self._drain.require_running(scope["path"])
            scope[BODY] = await _body(receive, headers, scope[RESERVATION])
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
        await self._send(scope, refusal, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Checks the headers of a request. Raises: Refusal: it is not allowed."""
        rules, path = self._rules, scope["path"]
        if "content-length" in headers and "transfer-encoding" in headers:
            said = "Content-Length and Transfer-Encoding cannot be sent together"
            raise Refusal(400, said, "", "bad_request")
        host = _name(headers.get("host"))
        if is_owner(scope):
            return
        if rules.hosts and not is_loopback(host) and not is_allowed(host, rules.hosts):
            said = f"Host not allowed: {host[:100]} (kt serve --allow-host allows it)"
            raise Refusal(403, said, "", "bad_host")
        origin = headers.get("origin")
        is_let_in = origin is not None and is_allowed(origin, rules.origins)
        if origin is not None and not is_let_in and not _is_own(origin, headers):
            said = f"Origin not allowed: {_plain(origin[:100])} (kt serve --allow-origin allows it)"
            raise Refusal(403, said, "", "bad_origin")
        is_foreign = headers.get("sec-fetch-site") == "cross-site" and not is_let_in
        if is_foreign and scope["method"] not in _SAFE:
            said = "Origin not allowed: the request comes from a page of another site"
            raise Refusal(403, said, "", "bad_origin")
        if is_let_in and is_preflight(scope["method"], headers):
            return  # which has no key yet
        if not rules.keys or path in OPEN_PATHS:
            return
        if (name := _key_name(headers, rules.keys)) is None:
            raise Refusal(401, "missing or invalid API key", "", "invalid_api_key")
        scope[KEY_NAME] = scope[NOTED]["key"] = name

    async def _send(self, scope: Scope, refusal: Refusal, receive: Receive, send: Send) -> None:
        body, headers = self._refuse(scope["path"], refusal)
        # Whatever the client still sends is not read, so the connection cannot be used again.
        response = Response(body, refusal.status, {**headers, "connection": "close"})
        await response(scope, receive, send)


async def _body(receive: Receive, headers: Headers, reservation: BodyReservation) -> bytes | None:
    """Returns the whole request body; None: the client has disconnected.

    Raises:
        Refusal: it is too large or too slow, or other bodies take the memory now.
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
                reservation.grow(size)
                if not message.get("more_body"):
                    return b"".join(parts).removeprefix(BYTE_ORDER_MARK)
    except TimeoutError as error:
        raise Refusal(
            408, f"the request body did not arrive within {BODY_S:.0f} s", "", "timeout"
        ) from error


def is_owner(scope: Scope) -> bool:
    """Returns whether a request came through the Unix socket, which only the server's owner can open: it has no
    port.
    """
    return (scope.get("server") or ("", 0))[1] is None


def require_owner(request: Request) -> None:
    """Checks that a request came through the Unix socket. Raises: Refusal: it did not; others do not see the path."""
    if not is_owner(request.scope):
        raise no_path(request)


def _too_large() -> Refusal:
    return Refusal(413, f"the request body exceeds {BODY_BYTES >> 20} MiB", "", "request_too_large")


def _name(host: str | None) -> str:
    """Returns the host name of a Host header, without the port; empty: there is no header, as in HTTP/1.0.

    Raises:
        Refusal: the header is malformed.
    """
    if host is None:
        return ""
    found = host_name(host)
    if found is None:
        raise Refusal(400, f"invalid Host header: {host[:100]!r}", "", "bad_host")
    return found


def _is_own(origin: str, headers: Headers) -> bool:
    """Returns whether a page comes from this server itself."""
    return origin.partition("://")[2] == headers.get("host")


async def _send_preflight(headers: Headers, send: Send) -> None:
    raw = [(name.encode(), value.encode()) for name, value in preflight_headers(headers).items()]
    # Not 204, which some old browsers and programs take for a failure.
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    await send({"type": "http.response.body", "body": b""})


RawHeaders = list[tuple[bytes, bytes]]


def _with_headers(raw: Iterable[tuple[bytes, bytes]], added: dict[str, str]) -> RawHeaders:
    """Returns the headers of a response with others in place of those of the same names; each response has an id."""
    found = [(name, value) for name, value in raw if name.decode("latin-1") not in added]
    found += [(name.encode(), value.encode("latin-1")) for name, value in added.items()]
    if not any(name == REQUEST_ID.encode() for name, _ in found):
        found.append((REQUEST_ID.encode(), secrets.token_hex(12).encode()))
    return found


def _request_id(raw: RawHeaders) -> str:
    return next(value for name, value in raw if name == REQUEST_ID.encode()).decode("latin-1")


def _plain(text: str) -> str:
    """Returns a text with everything that is not printable escaped, so that it is one line and moves no cursor."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def _key_name(headers: Headers, keys: ApiKeys) -> str | None:
    """Returns the name of the API key that a request has; None: it has none of the server's."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    name = keys.name_of(bearer)
    return keys.name_of(headers.get("x-api-key", "")) if name is None else name


_ADDRESS = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
# The paths of OpenAI's and Anthropic's APIs, behind the `/v1` that belongs to the address.
_UNVERSIONED = re.compile(
    r"/(?:chat/completions(?:/render|/input_tokens)?|completions|embeddings|models(?:/.+)?|messages(?:/count_tokens)?"
    r"|responses(?:/.+)?)"
)
# Paths of this server that clients ask for behind an address that ends in `/v1`.
_OWN = re.compile(r"/v1/(?:tokenize|detokenize|apply-template|props|version|health|metrics)")


def meant_path(path: str, root: str = "") -> str:
    """Returns the path that a request means, as this server's routes have it: without an address, the proxy's root and
    trailing slashes, and with `/v1` only where the route has it.

    Args:
        path: the target of the request, decoded, without its query.
        root: the path below which a proxy publishes the server; it may have been removed already.
    """
    found = _ADDRESS.sub("", path, count=1) if _ADDRESS.match(path) else path
    if root and (found == root or found.startswith(f"{root}/")):
        found = found.removeprefix(root)
    found = found.rstrip("/") or "/"
    if _OWN.fullmatch(found):
        return found.removeprefix("/v1")
    return f"/v1{found}" if _UNVERSIONED.fullmatch(found) else found
