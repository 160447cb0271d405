"""Keeps a connection alive until its answer can begin, while a model is loaded or a long prompt tokenized.

Where that takes more than a moment, a stream begins without the answer: its headers go out, then keep-alive bytes; an
error that comes later is sent in the stream. A request whose client disconnects is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.requests import Request

from ktcli.records import dataclass
from ktcli.server.http.answering import (
    ALIVE_S,
    App,
    Receive,
    Scope,
    Send,
    gone,
    send_body,
    send_start,
)
from ktcli.server.http.body import BODY, RESERVATION
from ktcli.server.http.refusals import Refusal, refusal_of

SILENT_S = 3.0  # until a stream begins without its answer

Handler = Callable[[Request], Awaitable[App]]


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """The beginnings and errors of one API's streams before there are any answers.

    Attributes:
        alive: the keep-alive bytes of a stream.
        failed: returns the end of a stream that failed, given the body of its request.
        default: whether a request without the field `stream` asks for a stream.
    """

    media_type: str
    alive: bytes
    failed: Callable[[bytes, Refusal], bytes]
    default: bool = False


class _StreamOption(msgspec.Struct):
    stream: bool | None = None


def waiting(handler: Handler, style: StreamStyle | None = None) -> Handler:
    """Returns a handler that runs `handler`, and cancels it if the client disconnects meanwhile. If it takes more than
    SILENT_S seconds and the request asks for a stream, the stream begins, with keep-alive bytes until the response is
    made.

    Args:
        style: the style of the streams that the handler makes; None: it makes none.
    """

    @functools.wraps(handler)
    async def handle(request: Request) -> App:
        return _WaitingReply(handler, style, request)

    return handle


class _WaitingReply:
    """An ASGI application that answers one request with what its handler makes, however long that takes."""

    def __init__(self, handler: Handler, style: StreamStyle | None, request: Request) -> None:
        self._handler, self._style, self._request = handler, style, request
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = asyncio.ensure_future(self._handler(self._request))
        leaving = asyncio.create_task(gone(receive))
        try:
            await self._wait(making, leaving, send)
        finally:
            leaving.cancel()
            if not making.done():
                making.cancel()
                await asyncio.wait({making})
        if not making.cancelled():
            await self._answer(making, scope, receive, send)

    def _forget_body(self) -> None:
        """Frees the memory of the request body: sending the answer may take hours."""
        scope = self._request.scope
        scope[BODY] = b""
        scope[RESERVATION].release()

    async def _wait(
        self, making: asyncio.Future[App], leaving: asyncio.Task[None], send: Send
    ) -> None:
        """Waits until the handler has made its application, or the client has left."""

        both: set[asyncio.Future[Any]] = {making, leaving}

        async def passes(seconds: float | None) -> bool:
            done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return not done

        if not await passes(SILENT_S):
            return
        style = self._style
        if style is None or not self._streams(style):
            await passes(None)
            return
        with contextlib.suppress(TimeoutError):  # the client takes nothing any more
            self._begun = True
            await send_start(send, 200, style.media_type, {"Cache-Control": "no-cache"})
            await send_body(send, style.alive)
            while await passes(ALIVE_S):
                await send_body(send, style.alive)

    def _streams(self, style: StreamStyle) -> bool:
        """Returns whether the request asks for a stream."""
        try:
            asked = msgspec.json.decode(self._request.scope[BODY], type=_StreamOption).stream
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return style.default if asked is None else asked

    async def _answer(
        self, making: asyncio.Future[App], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._begun:
            self._forget_body()
            await making.result()(scope, receive, send)
            return
        style = self._style
        assert style is not None
        error = making.exception()
        if isinstance(error, Exception):
            refusal = refusal_of(self._request, error)
            with contextlib.suppress(TimeoutError):
                failed = style.failed(self._request.scope[BODY], refusal)
                await send_body(send, failed, more=False)
            return
        self._forget_body()
        await making.result()(scope, receive, _without_start(send))


def _without_start(send: Send) -> Send:
    """Returns a `send` that drops the response start, which was sent already."""

    async def send_rest(message: MutableMapping[str, Any]) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return send_rest
