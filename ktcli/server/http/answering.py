"""Sends the answers to a request: whole, or as a stream with keep-alive bytes while there is no text.

Headers go out at once, before the prefill. A client that disconnects cancels its answers within one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ktcli.dialogue.answer import AnswerEvent, Ended
from ktcli.engine.request import Finish
from ktcli.server.http.refusals import Refusal, refusal_of
from ktcli.server.models.generation import Generation, Generations
from ktcli.server.tracing.spans import INFERENCE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

NOTED = "kt.noted"  # the key of a scope under which handlers note what the log should say
ALIVE_S = 5.0  # without text, after which a stream sends keep-alive bytes
SEND_S = 60.0  # in which a client must take what is sent
_WAIT_S = 3600.0  # nothing depends on it
encode = msgspec.json.Encoder().encode


def json_response(document: Any, status: int = 200) -> Response:
    """Returns the response that sends a document encoded as JSON."""
    return Response(encode(document), status, media_type="application/json")


class WireReply(ABC):
    """The answers in the format of one API."""

    media_type: str
    alive: bytes  # the keep-alive bytes of a stream

    def begin(self) -> bytes:
        """Returns the bytes with which a streamed response begins, before any text; empty in some APIs."""
        return b""

    def take(self, events: list[AnswerEvent]) -> bytes:
        """Adds events of the answers to this reply; returns the bytes that a stream sends for them, which may be
        empty."""
        return b"".join(self._said(each) for each in events)

    @abstractmethod
    def _said(self, event: AnswerEvent) -> bytes:
        """Adds an event; returns the part of the stream for it."""

    @abstractmethod
    def end(self) -> bytes:
        """Returns the last bytes of a streamed response whose answers have ended without an error."""

    @abstractmethod
    def failed(self, refusal: Refusal) -> bytes:
        """Returns the last bytes of a streamed response that failed, which tell the client of the error."""

    @abstractmethod
    def whole(self) -> bytes:
        """Returns the body of a response that is not streamed: one JSON document with all answers."""

    @abstractmethod
    def refused(self, refusal: Refusal) -> bytes:
        """Returns the body of an error response: the JSON document of an error in the format of this API."""


class Answering:
    """An ASGI application that sends the answers of a generation, or of several."""

    def __init__(
        self, generation: Generation | Generations, reply: WireReply, *, stream: bool
    ) -> None:
        of = Generations([generation]) if isinstance(generation, Generation) else generation
        self._generation, self._reply, self._stream = of, reply, stream
        self._error: Exception | None = None
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        try:
            with cancelled_at_end(receive, self._generation.cancel):
                await (self._streamed(send) if self._stream else self._collected(send))
        finally:
            scope[NOTED] |= self._generation.counts
            scope[INFERENCE] = self._generation.inference

    async def _streamed(self, send: Send) -> None:
        reply, generation = self._reply, self._generation
        await self._start(send, 200, reply.media_type, {"Cache-Control": "no-cache"})
        await send_body(send, reply.begin())
        said_s = time.monotonic()
        while not generation.over and self._error is None:
            data = self._taken(await generation.events(ALIVE_S))
            if not data and time.monotonic() - said_s >= ALIVE_S:
                data = reply.alive
            if data:
                await send_body(send, data)
                said_s = time.monotonic()
        end = (
            reply.end()
            if self._error is None
            else reply.failed(refusal_of(Request(self._scope), self._error))
        )
        await send_body(send, end, more=False)

    async def _collected(self, send: Send) -> None:
        while not self._generation.over and self._error is None:
            self._taken(await self._generation.events(_WAIT_S))
        if self._error is None:
            await self._start(send, 200, "application/json", {})
            await send_body(send, self._reply.whole(), more=False)
            return
        refusal = refusal_of(Request(self._scope), self._error)
        await self._start(send, refusal.status, "application/json", refusal.headers)
        await send_body(send, self._reply.refused(refusal), more=False)

    async def _start(
        self, send: Send, status: int, media_type: str, headers: dict[str, str]
    ) -> None:
        about = {"X-Request-Id": self._generation.id, **headers}
        await send_start(send, status, media_type, about)

    def _taken(self, events: list[AnswerEvent]) -> bytes:
        if self._generation.failure is not None:
            self._error = self._generation.failure
            return b""
        for each in events:
            if isinstance(each, Ended) and each.finish is Finish.FAILED:
                self._error = each.error or RuntimeError("the engine failed")
                return b""
        return self._reply.take(events) if events else b""


async def gone(receive: Receive) -> None:
    """Waits until the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def cancelled_at_end(receive: Receive, cancel: Callable[[], None]) -> Iterator[None]:
    """Opens a context in which an answer is sent. `cancel` is called once the client has disconnected, and always at
    the end; a TimeoutError (the client takes no more data) is suppressed."""

    async def watch() -> None:
        await gone(receive)
        cancel()

    watching = asyncio.create_task(watch())
    try:
        with contextlib.suppress(TimeoutError):
            yield
    finally:
        cancel()
        watching.cancel()


def stamp(seconds: float | None = None) -> str:
    """Returns a time, given in seconds since 1970, in UTC as "2026-01-31T12:00:00Z"; None: the current time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


async def send_start(send: Send, status: int, media_type: str, headers: dict[str, str]) -> None:
    """Sends the status and the headers of a response."""
    said = {"Content-Type": media_type, **headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in said.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_body(send: Send, data: bytes, *, more: bool = True) -> None:
    """Sends a part of a response's body; `more` says whether other parts follow.

    Raises:
        TimeoutError: the client did not accept it within SEND_S seconds.
    """
    async with asyncio.timeout(SEND_S):
        await send({"type": "http.response.body", "body": data, "more_body": more})
