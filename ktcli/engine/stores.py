"""The stores below memory, nearest first: what they have, and reading what lies in several of them; and what they keep
of an engine's memory: its pages, of each kind, and its states.

Each store says for itself what it has and how fast it reads; one that is slow or gone has nothing, so that the others
answer for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Numbers
from functools import partial
from typing import Protocol

from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import PagedMemory, WindowPages
from ktcli.engine.statepool import StatePool
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.records import dataclass


class Rate(Protocol):
    """Predicts how long a store's reads take, from measured ones."""

    @property
    def bps(self) -> float | None:
        """The bytes read per second; None: nothing was read yet."""

    @property
    def is_known(self) -> bool:
        """Whether that was measured lately and well."""

    def seconds(self, size_bytes: int) -> float:
        """Returns the predicted seconds of a read of so many bytes."""


class Store(Protocol):
    """The interface of a store that keeps pages and states longer than memory does, for example on disk.

    Attributes:
        name: the name of its tier: "disk".
    """

    name: str

    @property
    def rate(self) -> Rate:
        """The predictor of the durations of its reads."""

    def refresh(self) -> None:
        """Looks for pages and states that other processes stored; called when a request begins."""

    def seek(self, labels: Iterable[PageLabel]) -> None:
        """Looks these pages and states up in a store that cannot list its contents."""

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether a page or state is there, as far as it is known."""

    def states(self) -> Numbers[tuple[int, bytes, bytes]]:
        """Returns the stored states, longest prefix first: (end, previous, key)."""

    def read(self, labels: Numbers[PageLabel], into: Numbers[U8Array]) -> int:
        """Reads pages or states into memory and checks them; returns how many of the first ones are intact and in
        memory.
        """

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a page or state to be stored, unless it is there; another thread calls `fill`, which copies it, or
        returns False if it is gone. Returns whether it is queued.
        """

    def use(self, keys: Iterable[bytes]) -> None:
        """Records that a conversation with these keys, in their order, is used now."""

    def hurry(self) -> None:
        """Has everything in the queue stored at once, at full speed; does not wait for it."""

    def flush(self, wait_s: float) -> bool:
        """Stores everything in the queue; returns whether that was done within `wait_s` seconds."""


class Stores:
    """Several stores, nearest first, which are searched in this order.

    Attributes:
        all: the stores.
    """

    def __init__(self, stores: Iterable[Store]) -> None:
        self.all = tuple(stores)

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether one of them has a page or state."""
        return self._nearest(kind, key) is not None

    def lacking(self, kind: PageKind, key: bytes) -> Iterator[Store]:
        """Yields the stores that lack a page or state."""
        return (store for store in self.all if not store.has(kind, key))

    def states(self) -> list[tuple[int, bytes, bytes]]:
        """Returns the states in all stores, longest prefix first, each once."""
        return sorted({state for store in self.all for state in store.states()}, reverse=True)

    def seconds(self, sizes: Iterable[tuple[PageKind, bytes, int]]) -> float:
        """Returns the predicted seconds of reading pages and states (kind, key, bytes), each from the nearest store."""
        wanted: dict[str, tuple[Store, int]] = {}
        for kind, key, size in sizes:
            if (store := self._nearest(kind, key)) is not None:
                wanted[store.name] = store, wanted.get(store.name, (store, 0))[1] + size
        return sum(store.rate.seconds(size) for store, size in wanted.values())

    def unmeasured(self, labels: Iterable[PageLabel]) -> bool:
        """Returns whether one of these would come from a store whose rate is not known."""
        near = (self._nearest(each.kind, each.key) for each in labels)
        return any(store is not None and not store.rate.is_known for store in near)

    def hurry(self) -> None:
        """Has all stores store their queues at once."""
        for store in self.all:
            store.hurry()

    def read(self, labels: Numbers[PageLabel], into: Numbers[U8Array]) -> list[Store]:
        """Reads pages or states, each from the nearest store that has it; returns the store of each of the first ones
        that are intact and in memory. The memory of all others holds anything.
        """
        came: list[Store] = []
        failed: list[Store] = []  # with the first record that did not come
        while len(came) < len(labels):
            left, places = labels[len(came) :], into[len(came) :]
            store = self._nearest(left[0].kind, left[0].key, failed)
            if store is None:
                break
            n = self._run(store, left)
            read = store.read(left[:n], places[:n])
            came += [store] * read
            if read == n:
                failed = []
            else:
                failed = [store] if read else [*failed, store]
        return came

    def _run(self, store: Store, labels: Numbers[PageLabel]) -> int:
        """How many of the first records are nearest in the same store as the first."""
        n = 1
        while n < len(labels) and self._nearest(labels[n].kind, labels[n].key) is store:
            n += 1
        return n

    def _nearest(self, kind: PageKind, key: bytes, without: Numbers[Store] = ()) -> Store | None:
        return next((s for s in self.all if s not in without and s.has(kind, key)), None)


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
