"""The adapters of a served model: attached to its engine between two steps of others when a request names one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine.adapters import Adapters, AttachedAdapter
from ktcli.errors import Busy
from ktcli.server.models.enginethread import EngineThread


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
    """An adapter that stays with the engine until it is given back."""

    def __init__(self, held: _InMemory) -> None:
        self._held: _InMemory | None = held
        self.attached = held.attached
        held.users += 1

    def again(self) -> Borrowed:
        """Returns the same adapter, which is given back on its own."""
        assert self._held is not None, "it was given back"
        return Borrowed(self._held)

    def give_back(self) -> None:
        """Ends the use; a second call does nothing."""
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

    async def borrow(self, name: str, digest: str) -> Borrowed:
        """Returns an adapter of the library; what nobody has used for longest makes room for it.

        Args:
            digest: of its files as they are now.
        Raises:
            KtError: it cannot be read, or has more ranks than there is room for.
            Busy: all room is in use, or the server shuts down.
        """
        async with self._lock:
            if digest not in self._held:
                await self._attach(await asyncio.to_thread(self._read, name))
            return Borrowed(self._held[digest])

    async def _attach(self, adapter: PackedAdapter) -> None:
        while self._is_full(adapter.size_bytes):
            idle = [(each.used_s, key) for key, each in self._held.items() if not each.users]
            if not idle:
                raise Busy(
                    f"there is no room for the adapter {adapter.name}: the {len(self._held)} in memory are in use",
                    hint="try again in a moment",
                )
            gone = self._held.pop(min(idle)[1])
            await self._between_steps(partial(self._adapters.detach, gone.attached))
        attached = await self._between_steps(partial(self._adapters.attach, adapter))
        assert attached is not None
        self._held[adapter.digest] = _InMemory(attached, adapter.size_bytes)

    def _is_full(self, more_bytes: int) -> bool:
        """Tells whether an adapter of so many bytes has to wait for another to go: a single one always fits."""
        size = sum(each.size_bytes for each in self._held.values())
        room = self._adapters.room
        over = size + more_bytes > room.size_bytes
        return len(self._held) == room.most or (bool(self._held) and over)

    async def _between_steps(
        self, call: Callable[[], AttachedAdapter | None]
    ) -> AttachedAdapter | None:
        return await asyncio.wrap_future(self._thread.between_steps(call))
