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
        """The measured speed of the store's reads, bytes per second; None: nothing was read yet."""

    @property
    def is_known(self) -> bool:
        """Whether `seconds` can be relied on: enough reads were measured recently, or none yet of a store that is
        assumed to be fast.
        """

    def seconds(self, size_bytes: int) -> float:
        """Returns the predicted seconds of a read of `size_bytes` bytes from the store."""


class Store(Protocol):
    """The interface of a store that keeps pages and states longer than memory does, for example on disk.

    Attributes:
        name: the name of its tier: "disk".
    """

    name: str

    @property
    def rate(self) -> Rate:
        """The predictor of how long the store's reads take."""

    def refresh(self) -> None:
        """Makes the store look for pages and states that other processes stored; called when a request begins."""

    def seek(self, labels: Iterable[PageLabel]) -> None:
        """Looks up which of these pages and states are stored, if the store cannot list its contents, so that `has`
        knows it.
        """

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether the store has the page or state with this key, as far as is known without asking it."""

    def states(self) -> Numbers[tuple[int, bytes, bytes]]:
        """Returns a tuple (end, previous, key) for each stored recurrent state, the longest prefix first: the number of
        positions of its prefix, the key of the full pages before it, and its own key.
        """

    def read(self, labels: Numbers[PageLabel], into: Numbers[U8Array]) -> int:
        """Reads pages or states into the arrays `into`, one for each label, and checks them. Returns n: the first n
        were read and are intact; the arrays of the others may hold anything.
        """

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a page or state to be stored, unless the store has it; another thread then calls `fill`, which copies
        its bytes, or returns False if they are gone. Returns whether it was queued.
        """

    def use(self, keys: Iterable[bytes]) -> None:
        """Records that a conversation with the pages of these keys, in their order, is used now."""

    def hurry(self) -> None:
        """Makes the store write everything in its queue at once, at full speed; does not wait for it."""

    def flush(self, wait_s: float) -> bool:
        """Waits until the store's queue is empty; returns whether it was within `wait_s` seconds. What cannot be stored
        is dropped.
        """


class Stores:
    """Several stores, nearest first, which are searched in this order.

    Attributes:
        all: the stores.
    """

    def __init__(self, stores: Iterable[Store]) -> None:
        self.all = tuple(stores)

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether one of the stores has the page or state with this key."""
        return self._nearest(kind, key) is not None

    def lacking(self, kind: PageKind, key: bytes) -> Iterator[Store]:
        """Yields the stores that do not have the page or state with this key."""
        return (store for store in self.all if not store.has(kind, key))

    def states(self) -> list[tuple[int, bytes, bytes]]:
        """Returns a tuple (end, previous, key) for each recurrent state in any store, the longest prefix first and each
        once: the number of positions of its prefix, the key of the full pages before it, and its own key.
        """
        return sorted({state for store in self.all for state in store.states()}, reverse=True)

    def seconds(self, sizes: Iterable[tuple[PageKind, bytes, int]]) -> float:
        """Returns the predicted seconds of reading pages and states, given as (kind, key, bytes), each from the nearest
        store that has it; those in no store count 0.
        """
        wanted: dict[str, tuple[Store, int]] = {}
        for kind, key, size in sizes:
            if (store := self._nearest(kind, key)) is not None:
                wanted[store.name] = store, wanted.get(store.name, (store, 0))[1] + size
        return sum(store.rate.seconds(size) for store, size in wanted.values())

    def unmeasured(self, labels: Iterable[PageLabel]) -> bool:
        """Returns whether one of these pages and states would be read from a store whose reading speed is not known."""
        near = (self._nearest(each.kind, each.key) for each in labels)
        return any(store is not None and not store.rate.is_known for store in near)

    def hurry(self) -> None:
        """Makes each store write everything in its queue at once, without waiting for it."""
        for store in self.all:
            store.hurry()

    def read(self, labels: Numbers[PageLabel], into: Numbers[U8Array]) -> list[Store]:
        """Reads pages or states into the arrays `into`, one for each label, each from the nearest store that has it, up
        to the first one that no store gives intact. Returns the store of each one that was read; the arrays of the
        others may hold anything.
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
        """The name of the layout of pages and states in memory: only the same layout can be read back."""

    @property
    def state_bytes(self) -> int:
        """The bytes of a recurrent state, of all layers, as it is stored."""

    def saved_state(self, slot: int) -> U8Array:
        """Returns the bytes of the recurrent state in a slot as they are stored; any thread may ask for a snapshot,
        which is not written any more.

        Raises:
            DeviceError: the device that has them failed.
        """

    def state_room(self, slot: int) -> U8Array:
        """Returns a buffer into which a stored state is read; `restore_state` then copies it into the slot."""

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Copies the bytes of a state that were read into `room`, as `state_room` returned it, into a slot."""


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
        """Sets the function `evicted`, which is called with (kind, page number or slot, key) before a page or state
        loses its place in memory; None: nothing is called any more.
        """
        for each in self.kinds.values():
            each.pool.on_evict = None if evicted is None else partial(evicted, each.kind)
        if self.states is not None:
            self.states.on_evict = None if evicted is None else partial(evicted, PageKind.STATE)

    def saved(self, kind: PageKind, number: int) -> U8Array:
        """Returns the bytes, as they are stored, of the page with this number, or of the state in this slot, of the
        given kind; any thread may ask for what is not written any more.
        """
        if kind == PageKind.STATE:
            return self.own.saved_state(number)
        return self.kinds[kind].memory.saved_page(number)

    def size_bytes(self, kind: PageKind) -> int:
        """Returns the bytes that one page or state of this kind takes as it is stored."""
        if kind == PageKind.STATE:
            return self.own.state_bytes
        return self.kinds[kind].memory.page_bytes
