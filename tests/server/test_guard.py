"""The guard before a server's application: what it reads of a request, and what it notes of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ktcli.server.guard import BODY_BYTES, Guard
from ktcli.server.house import Rules
from ktcli.server.refusal import Refusal

Message = dict[str, Any]
LEFT = {"type": "http.disconnect"}


def asked(*received: Message, length: int | None = None) -> tuple[list[Message], list[Message]]:
    """What the guard noted of a request, and the messages of it that nobody took."""
    noted: list[Message] = []
    left = list(received)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Any) -> None:
        pass

    def refuse(path: str, refusal: Refusal) -> tuple[bytes, dict[str, str]]:
        return b"", {}

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "server": ("", 80)}
    asyncio.run(Guard(application, Rules(), refuse, noted.append)(scope, receive, send))
    return noted, left


@pytest.mark.parametrize("length", [BODY_BYTES + 1, 10 * BODY_BYTES, 10**11, 10**30])
def test_nothing_is_read_of_a_body_that_says_that_it_is_too_large(length: int) -> None:
    (noted,), left = asked({"type": "http.request", "body": b"x"}, length=length)
    assert noted["status"] == 413 and len(left) == 1


@pytest.mark.parametrize("length", [None, 0, 1, BODY_BYTES])
def test_a_body_that_may_be_as_large_is_read(length: int | None) -> None:
    (noted,), left = asked({"type": "http.request", "body": b"x"}, length=length)
    assert noted["status"] == 200 and not left


def test_who_leaves_before_anything_is_answered_is_noted_as_such() -> None:
    (noted,), _ = asked({"type": "http.request", "body": b"x", "more_body": True}, LEFT)
    assert noted["status"] == 499
