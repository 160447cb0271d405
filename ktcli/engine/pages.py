"""The pool of pages: reference counts, content addresses, and the order of eviction when memory is full.

Pages are numbers here; their memory is the engine's. A page that is *sealed* has a key that says what it holds (see
`prefix`): it is not written any more, can be found and shared, and stays when nobody holds it, until its place is
needed. A *snapshot* is the same for a state, see `statepool`. Nothing is allocated per token, and nothing here is
thread-safe: one thread drives an engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from ktcli.engine.pageindex import PageIndex
from ktcli.engine.prefix import Depths, Ids
from ktcli.errors import NotEnoughMemory
from ktcli.pagelabel import PageLabel
from ktcli.records import dataclass

# evicted(number, key): called while the memory still holds what the key says
Evicted = Callable[[int, bytes], None]

OTHERS_HOLD = "other conversations hold the rest: close one, or start kt with a larger --context"


class PoolFull(NotEnoughMemory):
    """Raised when all pages, or states, are held by sequences that are in use."""


class PageObserver(Protocol):
    """The interface of a listener for the pages that can be found in a pool; called on the engine's thread, which it
    must not block.
    """

    def came(self, label: PageLabel) -> None:
        """Called with the label of a page that has just got its content address, and can be found by it."""

    def went(self, key: bytes) -> None:
        """Called with the content address of a page that cannot be found by it any more."""


@dataclass(slots=True)
class PoolCounts:
    """The numbers of events in a pool since it was made.

    Attributes:
        found, missed: the keys that were asked for and were there, or were not.
        evicted: the idle ones whose place was taken.
        most_held: the most that were held at once.
    """

    found: int = 0
    missed: int = 0
    evicted: int = 0
    most_held: int = 0


class PagePool:
    """The pages of an engine, by number.

    A page is free, held (by one or several), or idle: sealed and held by nobody.

    Args:
        count: the number of pages.
        what: what they are, in an error.
        each_bytes: the bytes of one.
    Attributes:
        on_evict: called before a page loses its content address, for the next tier; None: nobody wants it.
        observer: is told what can be found; None: nobody wants to know.
    """

    def __init__(self, count: int, what: str = "the context", each_bytes: int = 0) -> None:
        self.count, self.each_bytes, self._what = count, each_bytes, what
        self._free = list(range(count - 1, -1, -1))  # the lowest number first: memory stays dense
        self._holders = [0] * count
        self._keys: dict[int, bytes] = {}  # of sealed pages
        self._pages: dict[bytes, int] = {}  # the same, the other way round
        self._index = PageIndex()
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._favoured: OrderedDict[int, None] = OrderedDict()  # idle ones that go after all others
        self._favours: set[int] = set()  # sealed pages that are favoured when they are idle
        self.counts = PoolCounts()
        self.on_evict: Evicted | None = None
        self.observer: PageObserver | None = None

    @property
    def free(self) -> int:
        """The number of pages that are neither held by a sequence nor sealed: their contents are of no use."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """The number of sealed pages that no sequence holds, but that can still be found by their content."""
        return len(self._idle) + len(self._favoured)

    @property
    def held(self) -> int:
        """The number of pages that one or more sequences hold."""
        return self.count - self.available

    @property
    def available(self) -> int:
        """The number of pages that `take` can allocate: free ones, and idle ones, which are sealed but held by no
        sequence.
        """
        return self.free + self.idle

    def take(self, n: int) -> list[int]:
        """Allocates `n` pages with one reference each; returns their numbers: free pages first, then idle ones, the
        least recently used first and favoured ones last.

        Raises:
            PoolFull: fewer are available; none was taken.
        """
        if n > self.available:
            need, have = n * self.each_bytes, self.available * self.each_bytes
            raise PoolFull(self._what, need, have, hint=OTHERS_HOLD)
        taken = []
        for _ in range(n):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            taken.append(page)
        self.counts.most_held = max(self.counts.most_held, self.held)
        return taken

    def hold(self, page: int) -> None:
        """Adds a reference to a page that is held or idle, so that it is not evicted."""
        if not self._holders[page]:
            del self._line(page)[page]  # KeyError: it is free, and holds nothing
        self._holders[page] += 1
        self.counts.most_held = max(self.counts.most_held, self.held)

    def release(self, page: int) -> None:
        """Drops a reference to a page; without references a sealed page is idle, and can still be found, and any other
        page is free.
        """
        assert self._holders[page] > 0, f"page {page} has no holder"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._keys:
            self._line(page)[page] = None
        else:
            self._free.append(page)

    def holders(self, page: int) -> int:
        """Returns the number of references to a page."""
        return self._holders[page]

    def seal(self, page: int, key: bytes, label: PageLabel | None = None) -> bool:
        """Gives a held page, which is not written any more, its content address `key`; returns whether it did: if
        another page has that address, this one gets none.

        Args:
            label: what the page holds, by which `beginning` finds it; None: `beginning` does not find it.
        """
        assert self._holders[page] and page not in self._keys, f"page {page} cannot be sealed"
        if key in self._pages:
            return False
        self._keys[page], self._pages[key] = key, page
        if label is not None:
            self._index.add(page, label)
            if self.observer is not None:
                self.observer.came(label)
        return True

    def unseal(self, page: int) -> None:
        """Removes the content address of a page, because its only holder writes to it."""
        assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
        self._goes(page, self._keys[page])
        self._favours.discard(page)
        self._index.remove(page)
        del self._pages[self._keys.pop(page)]

    def sealed(self, page: int) -> bool:
        """Returns whether a page has a content address, by which `find` finds it."""
        return page in self._keys

    def find(self, key: bytes) -> int | None:
        """Returns the number of the page with the content address `key`, held or idle, and counts the search; an idle
        one stays findable until the next `take`. None: there is none.
        """
        page = self._pages.get(key)
        if page is None:
            self.counts.missed += 1
            return None
        self.counts.found += 1
        if not self._holders[page]:
            self._line(page).move_to_end(page)
        return page

    def beginning(self, previous: bytes, ids: Ids, depths: Depths) -> tuple[bytes, int] | None:
        """Returns the pair (key, n) of the page that follows the prefix `previous` and has the most leading ids in
        common with `ids`: its key, and the number of these ids, see `PageIndex.longest`; None: there is none.
        """
        found = self._index.longest(previous, ids, depths) if ids.size else None
        return None if found is None else (self._keys[found.page], found.tokens)

    def favour(self, key: bytes) -> None:
        """Lets the page with the content address `key`, if there is one, be evicted only after all that are not
        favoured, since reuse is likely to begin there.
        """
        page = self._pages.get(key)
        if page is None or page in self._favours:
            return
        if not self._holders[page]:
            del self._idle[page]
            self._favoured[page] = None
        self._favours.add(page)

    def page_of(self, key: bytes) -> int | None:
        """Returns the number of the page with the content address `key`, as `find`, but without changing counts or the
        order of eviction; None: there is none.
        """
        return self._pages.get(key)

    def forget(self) -> None:
        """Frees every idle page, and removes the content addresses of all pages, so that none can be found."""
        for page, key in self._keys.items():
            self._goes(page, key)
        self._free.extend((*self._idle, *self._favoured))
        self._idle.clear()
        self._favoured.clear()
        self._favours.clear()
        self._keys.clear()
        self._pages.clear()
        self._index.clear()

    def _evict(self) -> int:
        """Takes the place of the least recently used idle page."""
        page, _ = (self._idle or self._favoured).popitem(last=False)
        self._favours.discard(page)
        self._index.remove(page)
        key = self._keys.pop(page)
        del self._pages[key]
        self._goes(page, key)
        self.counts.evicted += 1
        return page

    def _line(self, page: int) -> OrderedDict[int, None]:
        """Where a page waits, or would wait, for its place to be taken."""
        return self._favoured if page in self._favours else self._idle

    def _goes(self, page: int, key: bytes) -> None:
        """Tells the next tier, and who observes, that what the key says will not be found here any more."""
        if self.on_evict is not None:
            self.on_evict(page, key)
        if self.observer is not None:
            self.observer.went(key)
