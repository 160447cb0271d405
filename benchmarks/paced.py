"""A server that answers at a fixed pace, so that what a load generator should find is known before.

    python benchmarks/paced.py PORT FIRST_MS NEXT_MS [TOGETHER]

Speaks as much of OpenAI's API as load generators use. A chat's first piece comes FIRST_MS after its request, and each
other one NEXT_MS after the one before, by the clock and not by sleeps that add up; a piece has TOGETHER tokens (1), and
an answer as many as are asked for. `GET /seen` tells what was answered since it was last asked: for each request the
moments in seconds at which it came and at which each piece of its answer was handed to the network.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

MODEL = "paced"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Paced:
    """The application: it holds nothing but its pace and what it saw."""

    def __init__(self, first_s: float, next_s: float, together: int = 1) -> None:
        self._first_s, self._next_s, self._together = first_s, next_s, together
        self._seen: list[list[float]] = []

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        came_s = asyncio.get_running_loop().time()
        if scope["path"] == "/v1/chat/completions":
            await self._answer(json.loads(await _body(receive)), came_s, send)
        elif scope["path"] == "/seen":
            seen, self._seen = self._seen, []
            await _document(send, seen)
        else:
            await _document(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _answer(self, asked: dict[str, Any], came_s: float, send: Send) -> None:
        tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
        loop, moments = asyncio.get_running_loop(), [came_s]
        await _head(send, b"text/event-stream")
        for piece, text in enumerate(self._pieces(tokens)):
            due_s = came_s + self._first_s + piece * self._next_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            await _event(send, {"choices": [{"index": 0, "delta": {"content": text}}]})
            moments.append(loop.time())
        await _event(send, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        words = sum(len(str(each["content"]).split()) for each in asked["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        await _event(send, {"choices": [], "usage": usage | {"total_tokens": words + tokens}})
        self._seen.append(moments)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _pieces(self, tokens: int) -> Iterator[str]:
        """The text of each piece."""
        for at in range(0, tokens, self._together):
            yield " word" * min(self._together, tokens - at)


async def _body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


async def _head(send: Send, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})


async def _document(send: Send, document: Any) -> None:
    await _head(send, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


async def _event(send: Send, event: dict[str, Any]) -> None:
    data = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL, **event}
    body = b"data: " + json.dumps(data).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def main() -> None:
    port, first_ms, next_ms = map(float, sys.argv[1:4])
    together = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    app = Paced(first_ms / 1e3, next_ms / 1e3, together)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
