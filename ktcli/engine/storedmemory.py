"""What stores keep of an engine's memory: its pages, of each kind, and its states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import PagedMemory, WindowPages
from ktcli.engine.statepool import StatePool
from ktcli.pagelabel import PageKind, U8Array
from ktcli.records import dataclass


class PageMemory(PagedMemory, Protocol):
    """The interface of the memory of pages and states, which stores write from and read into."""

    @property
    def codec(self) -> str:
        """The name of their layout."""

    @property
    def state_bytes(self) -> int:
        """The bytes of a state as it is stored."""

    def saved_state(self, slot: int) -> U8Array:
        """Returns the stored bytes of a state; for a snapshot any thread may ask."""

    def state_room(self, slot: int) -> U8Array:
        """Returns a buffer for the bytes of a state that is read; `restore_state` then copies them into its slot."""

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Copies the bytes that were read into `room`, as `state_room` returned it, into a slot."""


@dataclass(frozen=True, slots=True)
class KindPages:
    """The pages of one kind, and where they lie."""

    kind: PageKind
    pool: PagePool
    memory: PagedMemory


class StoredMemory:
    """The pages and states of an engine, which stores write from and read into.

    Attributes:
        own: where states lie, and pages of the usual kind.
        kinds: the pages, by kind.
        states: the pool of states; None: no layer has one.
        windows: the pages of the layers with a window; None: there are none.
    """

    def __init__(
        self,
        memory: PageMemory,
        pages: PagePool,
        states: StatePool | None,
        windows: WindowPages | None,
    ) -> None:
        self.own, self.states, self.windows = memory, states, windows
        self.kinds = {PageKind.PAGE: KindPages(PageKind.PAGE, pages, memory)}
        if windows is not None:
            assert windows.memory is not None
            self.kinds[PageKind.WINDOW] = KindPages(PageKind.WINDOW, windows.pool, windows.memory)

    def watch(self, evicted: Callable[[PageKind, int, bytes], None] | None) -> None:
        """Has `evicted` called with what loses its place in memory; None: nothing is called any more."""
        for each in self.kinds.values():
            each.pool.on_evict = None if evicted is None else partial(evicted, each.kind)
        if self.states is not None:
            self.states.on_evict = None if evicted is None else partial(evicted, PageKind.STATE)

    def saved(self, kind: PageKind, number: int) -> U8Array:
        """Returns the stored bytes of a page or a state, in place; any thread may ask."""
        if kind == PageKind.STATE:
            return self.own.saved_state(number)
        return self.kinds[kind].memory.saved_page(number)

    def size_bytes(self, kind: PageKind) -> int:
        """Returns the bytes of a page or a state as it is stored."""
        if kind == PageKind.STATE:
            return self.own.state_bytes
        return self.kinds[kind].memory.page_bytes
