"""The adapters of a served model: attached to its engine between two steps of others when a request names one.

They are read, and freed, on one thread of a lower priority: where the steps of others use all cores, it gets a fifth of
one, so that these become little slower; where a core is idle, all of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import TypeVar

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine.adapters import Adapters, AttachedAdapter
from ktcli.errors import BadCheckpoint, Busy
from ktcli.records import dataclass
from ktcli.server.models.enginethread import EngineThread
from ktcli.threadpool import Threads

T = TypeVar("T")
# The system's scheduler gives a thread of this niceness a third of the time that it gives one of 0.
_NICENESS, _MOST_NICENESS = 5, 19


@dataclass(eq=False, slots=True)
class _InMemory:
    """An adapter that the engine has.

    Attributes:
        users: how many requests use it.
        used_s: when the last of them ended, `time.monotonic`.
    """

    attached: AttachedAdapter
    size_bytes: int
    users: int = 0
    used_s: float = field(default_factory=time.monotonic)


class Borrowed:
    """A reference to an adapter, which stays with the engine until the reference is given back."""

    def __init__(self, held: _InMemory) -> None:
        self._held: _InMemory | None = held
        self.attached = held.attached
        held.users += 1

    def again(self) -> Borrowed:
        """Returns another reference to the same LoRA adapter, to be given back separately."""
        assert self._held is not None, "it was given back"
        return Borrowed(self._held)

    def give_back(self) -> None:
        """Drops this reference to the LoRA adapter; a second call does nothing."""
        held, self._held = self._held, None
        if held is not None:
            held.users -= 1
            held.used_s = time.monotonic()


class ServedAdapters:
    """The adapters of a served model; for the event loop.

    Args:
        thread: makes the engine's steps.
        adapters: those of the engine.
        read: reads an adapter by its name; on any thread.
    """

    def __init__(
        self,
        thread: EngineThread,
        adapters: Adapters,
        read: Callable[[str], PackedAdapter],
    ) -> None:
        self._thread, self._adapters, self._read = thread, adapters, read
        self._held: dict[str, _InMemory] = {}  # by the digest
        self._lock = asyncio.Lock()
        self._reader = Threads(1, "kt-adapters", _lower_priority)

    async def borrow(self, name: str, digest: str) -> Borrowed:
        """Returns a reference to a LoRA adapter of the library, loading it into the engine if necessary; unreferenced
        ones are unloaded while there is no room, the least recently used first.

        Args:
            digest: the SHA-256 of the adapter's files as they are now.
        Raises:
            KtError: it cannot be read, is not what was imported, or has more ranks than there is room for.
            Busy: all room is in use, or the server shuts down.
        """
        while digest not in self._held:  # others may let it go again before this goes on
            # A request that is given up leaves nothing half done, and the next finds what it has read.
            await asyncio.shield(self._load(name, digest))
        return Borrowed(self._held[digest])

    async def _load(self, name: str, digest: str) -> None:
        async with self._lock:
            if digest in self._held:
                return
            adapter = await asyncio.wrap_future(self._reader.submit(self._read, name))
            if adapter.digest != digest:
                raise BadCheckpoint(
                    f"the files of the adapter {name} have changed since it was imported",
                    hint="find out which: kt adapter verify",
                )
            await self._attach(adapter)

    async def _attach(self, adapter: PackedAdapter) -> None:
        while self._is_full(adapter.size_bytes):
            idle = [(each.used_s, key) for key, each in self._held.items() if not each.users]
            if not idle:
                raise Busy(
                    f"there is no room for the adapter {adapter.name}: the {len(self._held)} in memory are in use",
                    hint="try again in a moment",
                )
            gone = self._held.pop(min(idle)[1])
            await self._between_steps(partial(self._let_go, gone.attached))
        attached = await self._between_steps(partial(self._adapters.attach, adapter))
        self._held[adapter.digest] = _InMemory(attached, adapter.size_bytes)

    def _let_go(self, attached: AttachedAdapter) -> None:
        """Detaches an adapter, on the engine's thread; nobody but the reader holds it any more, which frees it."""
        detached = [self._adapters.detach(attached)]
        self._reader.submit(detached.clear)

    def _is_full(self, more_bytes: int) -> bool:
        """Returns whether an adapter of so many bytes has to wait for another to go: a single one always fits."""
        size = sum(each.size_bytes for each in self._held.values())
        room = self._adapters.room
        over = size + more_bytes > room.size_bytes
        return len(self._held) == room.most or (bool(self._held) and over)

    async def _between_steps(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.between_steps(call))


def _lower_priority() -> None:
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _MOST_NICENESS))
