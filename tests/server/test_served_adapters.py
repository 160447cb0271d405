"""The adapters of a served model without one: what is read and freed where, and requests that are given up."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine.adapters import Adapters, AttachedAdapter
from ktcli.errors import BadCheckpoint
from ktcli.planner.memory import AdapterRoom
from ktcli.server.models.adapters import ServedAdapters
from ktcli.server.models.enginethread import EngineThread


class Steps:
    """Calls what comes between steps on one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "steps")

    def between_steps(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)


class Freed(PackedAdapter):
    """An adapter that can be watched."""

    __slots__ = ("__weakref__",)


class There:
    """The adapters of an engine, of which it has two."""

    room = AdapterRoom(2, 8, 1 << 20)

    def __init__(self) -> None:
        self.held: dict[int, PackedAdapter] = {}

    def attach(self, adapter: PackedAdapter) -> AttachedAdapter:
        number = min({1, 2} - self.held.keys())
        self.held[number] = adapter
        return AttachedAdapter(number, adapter.digest)

    def detach(self, attached: AttachedAdapter) -> PackedAdapter:
        return self.held.pop(attached.number)


def served(read: Callable[[str], PackedAdapter]) -> ServedAdapters:
    return ServedAdapters(cast(EngineThread, Steps()), cast(Adapters, There()), read)


def test_it_is_read_and_freed_where_no_step_waits() -> None:
    """On one thread, to which the system gives less time than to the steps."""
    own, read_on, freed_on = os.getpriority(os.PRIO_PROCESS, 0), set[str](), list[str]()
    freed = threading.Event()

    def gone() -> None:
        freed_on.append(threading.current_thread().name)
        freed.set()

    def read(name: str) -> PackedAdapter:
        thread = threading.current_thread()
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == min(own + 5, 19)
        read_on.add(thread.name)
        made = Freed(name, name, {})
        weakref.finalize(made, gone)
        return made

    async def ask() -> None:
        adapters = served(read)
        for name in "abc":
            (await adapters.borrow(name, name)).give_back()
        assert await asyncio.to_thread(freed.wait, 60)  # before all are freed, on this thread

    asyncio.run(ask())
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    (name,) = read_on
    assert freed_on[0] == name and name.startswith("kt-adapters")


def test_a_request_that_is_given_up_leaves_nothing_half_done() -> None:
    began, goes_on, read = threading.Event(), threading.Event(), list[str]()

    def slow(name: str) -> PackedAdapter:
        read.append(name)
        began.set()
        assert goes_on.wait(60)
        return PackedAdapter(name, name, {})

    async def ask() -> None:
        adapters = served(slow)
        first = asyncio.ensure_future(adapters.borrow("a", "a"))
        await asyncio.to_thread(began.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        goes_on.set()
        for name in "abab":  # there is room for both
            (await adapters.borrow(name, name)).give_back()

    asyncio.run(ask())
    assert read == ["a", "b"]


def test_what_is_not_as_it_was_imported_is_refused() -> None:
    async def ask() -> None:
        adapters = served(lambda name: PackedAdapter(name, "other", {}))
        with pytest.raises(BadCheckpoint, match="the adapter a have changed"):
            await adapters.borrow("a", "a")

    asyncio.run(ask())
