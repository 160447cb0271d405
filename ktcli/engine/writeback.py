"""The pages and states that are due to be stored, and the copies of those whose place was taken before.

Nothing is copied before a store asks for it, or its place is needed: then a copy waits for the stores that have not
taken it yet. The copies are bounded; beyond that the oldest is given up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import field

from ktcli.engine.stores import Store, StoredMemory, Stores
from ktcli.errors import KtError
from ktcli.pagelabel import PageKind, PageLabel, U8Array
from ktcli.records import dataclass

_SPILL_BYTES = 256 << 20  # of copies of what was evicted before it was written

_Name = tuple[PageKind, bytes]


@dataclass(slots=True)
class _Unstored:
    """A page or state that stores wait for.

    Attributes:
        number: the page or slot that holds it; -1: it was evicted.
        waiting: the names of the stores that have not taken it.
        copy: what it held when it was evicted.
    """

    number: int
    waiting: set[str] = field(default_factory=set)
    copy: U8Array | None = None


class WriteBack:
    """Copies pages and states to stores that lack them, before their memory is reused."""

    def __init__(self, stores: Stores, memory: StoredMemory) -> None:
        self._stores, self._memory = stores, memory
        self._guard = threading.Lock()  # of what follows
        self._due: dict[_Name, _Unstored] = {}
        self._copied: OrderedDict[_Name, U8Array] = OrderedDict()  # oldest first
        self._copied_bytes = 0

    def put(self, number: int, label: PageLabel) -> None:
        """Queues the page with this number, or the state in this slot, for each store that lacks it; does nothing if
        pages or states of its kind have no bytes.
        """
        if size_bytes := self._memory.size_bytes(label.kind):
            for store in self._stores.lacking(label.kind, label.key):
                self._put(store, number, label, size_bytes)

    def _put(self, store: Store, number: int, label: PageLabel, size_bytes: int) -> None:
        name = label.kind, label.key
        with self._guard:
            due = self._due.setdefault(name, _Unstored(number))
            self._drop_copy(name, due)
            due.number = number
            due.waiting.add(store.name)
        if not store.put(label, size_bytes, lambda into: self._fill(name, store.name, into)):
            with self._guard:
                self._taken(name, store.name)

    def evicted(self, kind: PageKind, number: int, key: bytes) -> None:
        """Copies a queued page or state that stores still wait for, as its memory is about to be reused; beyond 256 MiB
        the oldest copies are dropped.
        """
        name = kind, key
        with self._guard:
            due = self._due.get(name)
            if due is None or due.number != number:
                return
            due.waiting &= {store.name for store in self._stores.lacking(*name)}
            if not due.waiting:
                del self._due[name]
                return
            try:
                due.number, due.copy = -1, self._memory.saved(kind, number).copy()
            except KtError:  # the device failed; whoever runs the next step says so
                del self._due[name]
                return
            self._copied[name] = due.copy
            self._copied_bytes += due.copy.size
            while self._copied_bytes > _SPILL_BYTES:
                oldest = next(iter(self._copied))
                self._drop_copy(oldest, self._due.pop(oldest))

    def forget(self) -> None:
        """Drops all queued pages and states, and the copies made of them: their memory is about to be freed."""
        with self._guard:
            self._due.clear()
            self._copied.clear()
            self._copied_bytes = 0

    def _fill(self, name: _Name, store: str, into: U8Array) -> bool:
        """Copies what is due; called by the thread of a store."""
        with self._guard:
            due = self._due.get(name)
            if due is None or store not in due.waiting:
                return False
            try:
                into[:] = self._memory.saved(name[0], due.number) if due.copy is None else due.copy
            except KtError:  # the device failed; whoever runs the next step says so
                return False
            finally:
                self._taken(name, store)
        return True

    def _taken(self, name: _Name, store: str) -> None:
        """Notes that a store does not wait for something any more."""
        due = self._due.get(name)
        if due is not None:
            due.waiting.discard(store)
            if not due.waiting:
                self._drop_copy(name, self._due.pop(name))

    def _drop_copy(self, name: _Name, due: _Unstored) -> None:
        if due.copy is not None:
            self._copied_bytes -= self._copied.pop(name).size
            due.copy = None
