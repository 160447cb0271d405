"""The pool of states: slots, and the snapshots from which a sequence with the same beginning can continue.

A state has a fixed size: some layers store it for a sequence instead of its positions. A step reads the state at its
start from one slot and writes the state at its end to another (see `sequence`). How prompts are cut, so that states are
left where reuse begins, is decided here, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from ktcli.engine.pages import OTHERS_HOLD, Evicted, PoolCounts, PoolFull
from ktcli.records import dataclass

# A prompt's last tokens are a chunk of their own, so that a position right before them can be gone back to: to
# answer again, or because a template writes the opening of an answer otherwise once the answer is there.
_TAIL = 16
_LONG = 4 * _TAIL  # tokens of the shortest prompt for which that is worth a step


class Place(NamedTuple):
    """The position of a snapshot in its sequence.

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
        """The number of slots that hold no state: neither one in use by a sequence, nor a spare one, nor a snapshot."""
        return len(self._free)

    def take(self) -> int:
        """Allocates a slot for a recurrent state, with one reference, and returns its number: a free slot, else the
        oldest spare one, else the slot of a snapshot, which is dropped.

        Raises:
            PoolFull: all slots are held by sequences.
        """
        if not self._free and self._spare:
            self._free.append(self._spare.popitem(last=False)[0])
        while not self._free and (alone := self._of_nobody()):
            self._drop(self._victim(alone))
            self.counts.evicted += 1
        if not self._free:
            raise PoolFull(self._what, self.each_bytes, 0, hint=OTHERS_HOLD)
        slot = self._free.pop()
        self._holders[slot] = 1
        self.counts.most_held = max(self.counts.most_held, sum(map(bool, self._holders)))
        return slot

    def hold(self, slot: int) -> None:
        """Adds a reference to a slot that is held, whose state will not be written any more."""
        assert self._holders[slot], f"slot {slot} has no holder"
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Drops a reference to a slot; without references the slot is free."""
        assert self._holders[slot] > 0, f"slot {slot} has no holder"
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    def spare(self, slot: int) -> int | None:
        """Drops a sequence's reference to a slot, but leaves the state there until the slot is needed. Returns a
        ticket, the number with which `back` can reclaim the state; None: others hold the slot, or its state is a
        snapshot.
        """
        if self._holders[slot] > 1:
            self.release(slot)
            return None
        self._holders[slot] = 0
        self._tickets += 1
        self._spare[slot] = self._tickets
        return self._tickets

    def has(self, slot: int, ticket: int) -> bool:
        """Returns whether the slot still contains the spare state for which `spare` returned the number `ticket`."""
        return self._spare.get(slot) == ticket

    def back(self, slot: int, ticket: int) -> bool:
        """Takes again the reference to a slot that `spare` dropped, if the slot still contains the state for which
        `spare` returned the number `ticket`; returns whether it does.
        """
        if not self.has(slot, ticket):
            return False
        del self._spare[slot]
        self._holders[slot] = 1
        return True

    def discard(self, slot: int, ticket: int) -> None:
        """Frees a spare slot, if it still contains the state for which `spare` returned the number `ticket`."""
        if self.back(slot, ticket):
            self.release(slot)

    def keep(self, key: bytes, slot: int, at: Place, line: int) -> None:
        """Makes the state in a held slot a snapshot, with a reference of its own, which other sequences find by its
        key; if the pool has its most snapshots, another one is dropped. A snapshot that has the key already stays.

        Args:
            key: the key of the prefix whose state it is.
            at: the position of the snapshot.
            line: the number of the sequence that left it.
        """
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
        """Returns the slot of the snapshot of the prefix with this key, to be held before the next allocation, and
        counts the search; None: there is none.
        """
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            self.counts.missed += 1
            return None
        self._clock += 1
        snapshot.used = self._clock
        self.counts.found += 1
        return snapshot.slot

    def slot_of(self, key: bytes) -> int | None:
        """Returns the slot of the snapshot of the prefix with this key, as `find`, but without changing counts or the
        order of eviction; None: there is none.
        """
        snapshot = self._snapshots.get(key)
        return None if snapshot is None else snapshot.slot

    def places(self) -> list[tuple[Place, bytes]]:
        """Returns a pair (place, key) for each snapshot: where it lies in its sequence (the number of tokens before it
        and the key of the full pages before it), and the key of its whole prefix.
        """
        return [(each.at, key) for key, each in self._snapshots.items()]

    def forget(self) -> None:
        """Drops every snapshot, so that no state can be found any more."""
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


def before_tail(size: int, left: int) -> int:
    """Returns the number of tokens of a prompt's next chunk, at most `size`, when `left` tokens are still to be
    computed: if these are 64 or more, the chunk ends at least 16 tokens before the prompt's end.
    """
    return min(size, left - _TAIL) if left >= _LONG else size


def worth_a_step(positions: Iterable[int], start: int, end: int) -> list[int]:
    """Returns those of `positions` at which a step should end to leave a state there, for a prompt whose tokens from
    `start` to `end` are new: those at least 16 tokens after `start` and before `end`; if 64 or more tokens are new, at
    least 16 before it, where a step ends anyway.
    """
    last = end - _TAIL if end - start >= _LONG else end - 1
    return [position for position in positions if start + _TAIL <= position <= last]
