"""The pools of pages and states: reference counts, content addresses, and the order of eviction when memory ends.

Pages and states are numbers here; their memory is the engine's. A page that is *sealed* has a key that says what it
holds (see `prefix`): it is not written any more, can be found and shared, and stays when nobody holds it, until its
place is needed. A *snapshot* is the same for a state. Nothing is allocated per token, and nothing here is thread-safe:
one thread drives an engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ktcli.errors import NotEnoughMemory

# evicted(number, key): called while the memory still holds what the key says
Evicted = Callable[[int, bytes], None]

_OTHERS = "other conversations hold the rest: close one, or start kt with a larger --context"


class PoolFull(NotEnoughMemory):
    """Raised when all pages, or states, are held by sequences that are in use."""


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
    """

    def __init__(self, count: int, what: str = "the context", each_bytes: int = 0) -> None:
        self.count, self.each_bytes, self._what = count, each_bytes, what
        self._free = list(range(count - 1, -1, -1))  # the lowest number first: memory stays dense
        self._holders = [0] * count
        self._keys: dict[int, bytes] = {}  # of sealed pages
        self._pages: dict[bytes, int] = {}  # the same, the other way round
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._favoured: OrderedDict[int, None] = OrderedDict()  # idle ones that go after all others
        self._favours: set[int] = set()  # sealed pages that are favoured when they are idle
        self.counts = PoolCounts()
        self.on_evict: Evicted | None = None

    @property
    def free(self) -> int:
        """The number of pages that are neither held nor sealed."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """The number of pages that nobody holds, but that can be found."""
        return len(self._idle) + len(self._favoured)

    @property
    def held(self) -> int:
        """The number of pages that somebody holds."""
        return self.count - self.available

    @property
    def available(self) -> int:
        """The number of pages that `take` can give: free and idle ones."""
        return self.free + self.idle

    def take(self, n: int) -> list[int]:
        """Takes `n` pages, each held once, and returns them: free ones, then idle ones, the least recently used
        first.

        Raises:
            PoolFull: fewer are available; none was taken.
        """
        if n > self.available:
            need, have = n * self.each_bytes, self.available * self.each_bytes
            raise PoolFull(self._what, need, have, hint=_OTHERS)
        taken = []
        for _ in range(n):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            taken.append(page)
        self.counts.most_held = max(self.counts.most_held, self.held)
        return taken

    def hold(self, page: int) -> None:
        """Adds a holder to a page: to one that somebody holds, or to an idle one."""
        if not self._holders[page]:
            del self._line(page)[page]  # KeyError: it is free, and holds nothing
        self._holders[page] += 1
        self.counts.most_held = max(self.counts.most_held, self.held)

    def release(self, page: int) -> None:
        """Takes a holder from a page; without holders a sealed page is idle, any other free."""
        assert self._holders[page] > 0, f"page {page} has no holder"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._keys:
            self._line(page)[page] = None
        else:
            self._free.append(page)

    def holders(self, page: int) -> int:
        """Returns the number of holders of a page."""
        return self._holders[page]

    def seal(self, page: int, key: bytes) -> bool:
        """Gives a held page, which is not written any more, its content address; returns False, and leaves the page
        without one, if another page has it."""
        assert self._holders[page] and page not in self._keys, f"page {page} cannot be sealed"
        if key in self._pages:
            return False
        self._keys[page], self._pages[key] = key, page
        return True

    def unseal(self, page: int) -> None:
        """Removes the content address of a page, because its only holder writes to it."""
        assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
        self._goes(page, self._keys[page])
        self._favours.discard(page)
        del self._pages[self._keys.pop(page)]

    def sealed(self, page: int) -> bool:
        """Tells whether a page has a content address."""
        return page in self._keys

    def find(self, key: bytes) -> int | None:
        """Returns the page with this content address, held or idle; an idle one stays so until something is taken.
        None: there is none."""
        page = self._pages.get(key)
        if page is None:
            self.counts.missed += 1
            return None
        self.counts.found += 1
        if not self._holders[page]:
            self._line(page).move_to_end(page)
        return page

    def favour(self, key: bytes) -> None:
        """Lets the page with this content address, if there is one, be evicted after all that are not favoured:
        reuse is likely to begin there."""
        page = self._pages.get(key)
        if page is None or page in self._favours:
            return
        if not self._holders[page]:
            del self._idle[page]
            self._favoured[page] = None
        self._favours.add(page)

    def page_of(self, key: bytes) -> int | None:
        """Returns the page with this content address, as `find`, but without counting or moving anything; None:
        there is none."""
        return self._pages.get(key)

    def forget(self) -> None:
        """Frees every idle page, and forgets every content address."""
        for page, key in self._keys.items():
            self._goes(page, key)
        self._free.extend((*self._idle, *self._favoured))
        self._idle.clear()
        self._favoured.clear()
        self._favours.clear()
        self._keys.clear()
        self._pages.clear()

    def _evict(self) -> int:
        """Takes the place of the least recently used idle page."""
        page, _ = (self._idle or self._favoured).popitem(last=False)
        self._favours.discard(page)
        key = self._keys.pop(page)
        del self._pages[key]
        self._goes(page, key)
        self.counts.evicted += 1
        return page

    def _line(self, page: int) -> OrderedDict[int, None]:
        """Where a page waits, or would wait, for its place to be taken."""
        return self._favoured if page in self._favours else self._idle

    def _goes(self, page: int, key: bytes) -> None:
        """Tells the next tier that what the key says will not be found here any more."""
        if self.on_evict is not None:
            self.on_evict(page, key)


class Place(NamedTuple):
    """The place of a snapshot in its sequence.

    Attributes:
        page_key: the key of the full pages before it.
        position: the number of tokens before it.
    """

    page_key: bytes
    position: int


@dataclass(slots=True)
class _Snapshot:
    """A state that is kept beyond the sequence that computed it.

    Attributes:
        slot: where it lies.
        at: the tokens that it is the state of.
        line: the sequence that left it.
        used: when it was last left or found, in uses of the pool.
    """

    slot: int
    at: Place
    line: int
    used: int


class StatePool:
    """The slots of an engine for states, by number.

    A slot is free, held, *spare* (its sequence has gone on, and would like to find it again) or of a snapshot. Spare
    ones go first, the oldest first; then snapshots.

    Args:
        count: the number of slots.
        snapshots: the most snapshots; the others are for sequences.
        what, each_bytes: as of `PagePool`.
    Attributes:
        on_evict: called before a snapshot is dropped, for the next tier; None: nobody wants it.
    """

    def __init__(
        self, count: int, snapshots: int, what: str = "the states", each_bytes: int = 0
    ) -> None:
        self.count, self.each_bytes, self._what = count, each_bytes, what
        self._most = snapshots
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._spare: OrderedDict[int, int] = OrderedDict()  # slot: its ticket
        self._tickets = 0
        self._snapshots: dict[bytes, _Snapshot] = {}
        self._clock = 0
        self.counts = PoolCounts()
        self.on_evict: Evicted | None = None

    @property
    def free(self) -> int:
        """The number of slots that are neither held nor spare nor of a snapshot."""
        return len(self._free)

    @property
    def snapshots(self) -> int:
        """The number of snapshots."""
        return len(self._snapshots)

    def take(self) -> int:
        """Takes a slot, held once, and returns it.

        Raises:
            PoolFull: all are held.
        """
        if not self._free and self._spare:
            self._free.append(self._spare.popitem(last=False)[0])
        while not self._free and (alone := self._of_nobody()):
            self._drop(self._victim(alone))
            self.counts.evicted += 1
        if not self._free:
            raise PoolFull(self._what, self.each_bytes, 0, hint=_OTHERS)
        slot = self._free.pop()
        self._holders[slot] = 1
        self.counts.most_held = max(self.counts.most_held, sum(map(bool, self._holders)))
        return slot

    def hold(self, slot: int) -> None:
        """Adds a holder to a held slot, whose contents will not be written any more."""
        assert self._holders[slot], f"slot {slot} has no holder"
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Takes a holder from a slot."""
        assert self._holders[slot] > 0, f"slot {slot} has no holder"
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def spare(self, slot: int) -> int | None:
        """Takes a holder from a slot, and leaves the state until the slot is needed; returns the ticket with which
        `back` finds it, None if others hold it or it is a snapshot."""
        if self._holders[slot] > 1:
            self.release(slot)
            return None
        self._holders[slot] = 0
        self._tickets += 1
        self._spare[slot] = self._tickets
        return self._tickets

    def has(self, slot: int, ticket: int) -> bool:
        """Tells whether the spare state that the ticket is for is still there."""
        return self._spare.get(slot) == ticket

    def back(self, slot: int, ticket: int) -> bool:
        """Holds a spare slot again, if the state that the ticket is for is still there; returns whether it is."""
        if not self.has(slot, ticket):
            return False
        del self._spare[slot]
        self._holders[slot] = 1
        return True

    def discard(self, slot: int, ticket: int) -> None:
        """Frees a spare slot, if the state that the ticket is for is still there."""
        if self.back(slot, ticket):
            self.release(slot)

    def keep(self, key: bytes, slot: int, at: Place, line: int) -> None:
        """Makes a snapshot of a held slot, under the key of the tokens that it is the state of."""
        self._clock += 1
        if key in self._snapshots:
            self._snapshots[key].used = self._clock
            return
        if not self._most:
            return
        if len(self._snapshots) >= self._most:
            self._drop(self._victim(self._snapshots))
            self.counts.evicted += 1
        self.hold(slot)
        self._snapshots[key] = _Snapshot(slot, at, line, self._clock)

    def find(self, key: bytes) -> int | None:
        """Returns the slot of a snapshot, to be held before anything else is taken; None: there is none."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            self.counts.missed += 1
            return None
        self._clock += 1
        snapshot.used = self._clock
        self.counts.found += 1
        return snapshot.slot

    def slot_of(self, key: bytes) -> int | None:
        """Returns the slot of a snapshot, as `find`, but without counting or moving anything; None: there is none."""
        snapshot = self._snapshots.get(key)
        return None if snapshot is None else snapshot.slot

    def places(self) -> list[tuple[Place, bytes]]:
        """Returns the places of all snapshots, and their keys."""
        return [(each.at, key) for key, each in self._snapshots.items()]

    def forget(self) -> None:
        """Drops every snapshot."""
        for key in tuple(self._snapshots):
            self._drop(key)

    def _of_nobody(self) -> list[bytes]:
        """The snapshots where no sequence stands: dropping another would free nothing."""
        times = Counter(each.slot for each in self._snapshots.values())
        return [
            key
            for key, each in self._snapshots.items()
            if self._holders[each.slot] == times[each.slot]
        ]

    def _drop(self, key: bytes) -> None:
        if self.on_evict is not None:
            self.on_evict(self._snapshots[key].slot, key)
        self.release(self._snapshots.pop(key).slot)

    def _victim(self, among: Iterable[bytes]) -> bytes:
        """The snapshot that is missed least: of the line that has most of them the one whose neighbours are closest
        together, not one of its two latest; where no line has three, the least recently used."""
        lines: dict[int, list[bytes]] = {}
        for key in among:
            lines.setdefault(self._snapshots[key].line, []).append(key)
        crowd = max(lines.values(), key=lambda keys: (len(keys), -self._last_use(keys)))
        if len(crowd) < 3:
            return min(among, key=lambda key: self._snapshots[key].used)
        ordered = sorted(crowd, key=lambda key: self._snapshots[key].at.position)
        before = [0, *(self._snapshots[key].at.position for key in ordered)]
        gaps = [
            self._snapshots[ordered[i + 1]].at.position - before[i] for i in range(len(crowd) - 2)
        ]
        return ordered[gaps.index(min(gaps))]

    def _last_use(self, keys: Iterable[bytes]) -> int:
        return max(self._snapshots[key].used for key in keys)
