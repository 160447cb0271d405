"""The guard before a server's application: what it reads of a request, and what it notes of one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ktcli.server.http.guard import BODY_BYTES, Guard
from ktcli.server.http.refusals import Refusal
from ktcli.server.http.state import Rules
from ktcli.server.process.drain import Drain

Message = dict[str, Any]
OPEN = Rules()
LEFT = {"type": "http.disconnect"}


def asked(
    *received: Message, headers: Sequence[tuple[str, str]] = (), rules: Rules = OPEN
) -> tuple[list[Message], list[Message]]:
    """What the guard noted of a request, and the messages of it that nobody took."""
    noted: list[Message] = []
    left = list(received)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Any) -> None:
        pass

    def refuse(path: str, refusal: Refusal) -> tuple[bytes, dict[str, str]]:
        return b"", {}

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]  # as in ASGI
    scope = {"type": "http", "method": "POST", "path": "/", "headers": raw, "server": ("", 80)}

    async def guarded() -> None:
        await Guard(application, rules, Drain(1.0), refuse, noted.append)(scope, receive, send)

    asyncio.run(guarded())
    return noted, left


@pytest.mark.parametrize("length", [BODY_BYTES + 1, 10 * BODY_BYTES, 10**11, 10**30])
def test_nothing_is_read_of_a_body_that_says_that_it_is_too_large(length: int) -> None:
    headers = [("content-length", str(length))]
    (noted,), left = asked({"type": "http.request", "body": b"x"}, headers=headers)
    assert noted["status"] == 413 and len(left) == 1


@pytest.mark.parametrize("length", ["", "0", "1", str(BODY_BYTES)])
def test_a_body_that_may_be_as_large_is_read(length: str) -> None:
    headers = [("content-length", length)] if length else []
    (noted,), left = asked({"type": "http.request", "body": b"x"}, headers=headers)
    assert noted["status"] == 200 and not left


def test_who_leaves_before_anything_is_answered_is_noted_as_such() -> None:
    (noted,), _ = asked({"type": "http.request", "body": b"x", "more_body": True}, LEFT)
    assert noted["status"] == 499


@pytest.mark.parametrize(("names", "status"), [(("a", "b"), 200), (("b", "a"), 403)])
def test_of_several_headers_of_one_name_the_first_counts(
    names: tuple[str, str], status: int
) -> None:
    headers = [("Host", names[0]), ("host", names[1])]
    rules = Rules(hosts=frozenset({"a"}))
    (noted,), _ = asked({"type": "http.request", "body": b"x"}, headers=headers, rules=rules)
    assert noted["status"] == status
