"""Laws of the pools: every number is somewhere exactly once, what is held is given to nobody, the oldest goes first."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.engine.statepool import Place, StatePool
from ktcli.errors import NotEnoughMemory


class Model:
    """What the pages of a pool should be: who holds them, what they hold, and in which order they were left."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.holds: Counter[int] = Counter()
        self.keys: dict[int, bytes] = {}
        self.favours: set[int] = set()
        self.left: list[int] = []  # idle ones, least recently used first

    @property
    def idle(self) -> list[int]:
        """Idle pages in the order in which their places are taken."""
        return sorted(self.left, key=lambda page: page in self.favours)

    @property
    def held(self) -> int:
        return len(+self.holds)

    def give(self, page: int) -> None:
        """The pool says that this page is free: it is, or it is the idle one that was used least recently."""
        assert not self.holds[page]
        if page in self.keys:
            assert self.held + len(self.left) == self.count and page == self.idle[0]
            self.left.remove(page)
            self.forget(page)
        self.holds[page] = 1

    def forget(self, page: int) -> None:
        self.favours.discard(page)
        del self.keys[page]

    def use(self, page: int) -> None:
        if page in self.left:
            self.left.remove(page)
            self.left.append(page)

    def release(self, page: int) -> None:
        self.holds[page] -= 1
        if not self.holds[page] and page in self.keys:
            self.left.append(page)


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_operations_leave_the_pages_that_were_free(seed: int) -> None:
    draw, count = random.Random(seed), 24
    pool, model = PagePool(count), Model(count)
    evicted: list[tuple[int, bytes]] = []
    pool.on_evict = lambda page, key: evicted.append((page, key))
    moved = 0  # idle pages that were found while others were left earlier and later
    for step in range(2500):
        held = sorted((+model.holds).elements())
        match draw.choice(
            "take take release release release release seal seal seal hold find find favour unseal".split()
        ):
            case "take":
                n, idle = draw.randint(0, 3), dict(model.keys)
                if n > count - model.held:
                    with pytest.raises(PoolFull):
                        pool.take(n)
                else:
                    evicted.clear()
                    for page in pool.take(n):
                        model.give(page)
                    assert all(idle[page] == key for page, key in evicted)
            case "release" if held:
                page = draw.choice(held)
                pool.release(page)
                model.release(page)
            case "hold" if held:
                page = draw.choice(held)
                pool.hold(page)
                model.holds[page] += 1
            case "seal" if free := [page for page in held if page not in model.keys]:
                page, key = draw.choice(free), bytes([step % 40])
                assert pool.seal(page, key) == (key not in model.keys.values())
                if pool.sealed(page):
                    model.keys[page] = key
            case "unseal" if own := [p for p in model.keys if model.holds[p] == 1]:
                page = draw.choice(own)
                pool.unseal(page)
                model.forget(page)
            case "find" | "favour" as what:
                there = {key: page for page, key in model.keys.items()}
                idle_keys = [model.keys[page] for page in model.left]
                some = idle_keys and draw.random() < 0.8
                key = draw.choice(idle_keys) if some else bytes([draw.randrange(40)])
                page = there.get(key)
                if what == "favour":
                    pool.favour(key)
                    if page is not None and page not in model.favours:
                        model.favours.add(page)
                        model.use(page)
                else:
                    assert pool.find(key) == page
                    if page is not None:
                        moved += page in model.left[1:-1]
                        model.use(page)
                    if page in model.left and draw.random() < 0.2:
                        pool.hold(page)
                        model.left.remove(page)
                        model.holds[page] = 1
            case _:
                pass
        assert (pool.held, pool.idle) == (model.held, len(model.idle))
        assert pool.free == count - model.held - len(model.idle)
        assert all(pool.holders(page) == model.holds[page] for page in range(count))
    assert moved > 100, "the order in which idle pages are used is hardly ever changed"
    for page in sorted((+model.holds).elements()):
        pool.release(page)
    assert pool.held == 0 and sorted(pool.take(count)) == list(range(count))


def test_a_full_pool_is_one_sentence_and_takes_nothing() -> None:
    pool = PagePool(3, "the context", 1 << 30)
    first = pool.take(2)
    with pytest.raises(
        NotEnoughMemory, match=r"the context needs 2\.0 GiB of memory, but only 1\.0 GiB"
    ):
        pool.take(2)
    assert pool.available == 1 and pool.held == 2
    pool.release(first[0])
    assert len(pool.take(2)) == 2


def test_nobody_holds_what_is_free_or_seals_it() -> None:
    pool = PagePool(2)
    with pytest.raises(KeyError):
        pool.hold(1)
    with pytest.raises(AssertionError):
        pool.release(0)
    with pytest.raises(AssertionError):
        pool.seal(0, b"a")


def test_forgetting_frees_what_nobody_holds() -> None:
    pool = PagePool(4)
    a, b = pool.take(2)
    pool.seal(a, b"a"), pool.seal(b, b"b")
    pool.release(a)
    pool.forget()
    assert (pool.free, pool.idle, pool.held) == (3, 0, 1)
    assert pool.find(b"a") is pool.find(b"b") is None
    pool.release(b)
    assert pool.free == 4


def test_forgetting_forgets_what_was_favoured() -> None:
    pool = PagePool(2)
    for page, key in zip(pool.take(2), (b"a", b"b"), strict=True):
        pool.seal(page, key)
    pool.favour(b"a")
    pool.forget()
    # The same pages, sealed anew: the first that is left goes first.
    for page in (0, 1):
        pool.seal(page, bytes([page]))
        pool.release(page)
    assert pool.take(1) == [0]


@pytest.mark.parametrize("seed", range(4))
def test_slots_hold_what_they_say(seed: int) -> None:
    """Random uses against what every slot was last written for."""
    draw, pool = random.Random(seed), StatePool(9, 4)
    written: dict[int, int] = {}  # by slot
    held: list[int] = []
    spare: list[tuple[int, int, int]] = []  # slot, ticket, what was written
    kept: dict[bytes, int] = {}  # what was written
    for step in range(2500):
        match draw.choice("take release hold spare back discard keep find".split()):
            case "take":
                try:
                    slot = pool.take()
                except PoolFull:
                    assert len(set(held)) == pool.count
                else:
                    assert slot not in held
                    written[slot] = step
                    held.append(slot)
            case "release" if held:
                pool.release(held.pop(draw.randrange(len(held))))
            case "hold" if held and len(held) < 20:
                held.append(draw.choice(held))
                pool.hold(held[-1])
            case "spare" if held:
                slot = held.pop(draw.randrange(len(held)))
                ticket = pool.spare(slot)
                if ticket is not None:
                    spare.append((slot, ticket, written[slot]))
            case "back" if spare:
                slot, ticket, what = spare.pop(draw.randrange(len(spare)))
                if pool.back(slot, ticket):
                    assert written[slot] == what and slot not in held
                    held.append(slot)
            case "discard" if spare:
                pool.discard(*spare.pop(draw.randrange(len(spare)))[:2])
            case "keep" if held:
                slot, key = draw.choice(held), bytes([draw.randrange(30)])
                pool.keep(key, slot, Place(b"", step), draw.randrange(3))
                kept[key] = (
                    kept.get(key, written[slot]) if pool.find(key) != slot else written[slot]
                )
            case "find":
                key = bytes([draw.randrange(30)])
                slot = pool.find(key)
                if slot is None:
                    kept.pop(key, None)
                else:
                    assert written[slot] == kept[key]
        assert len(pool.places()) <= 4
    for slot in held:
        pool.release(slot)
    for slot, ticket, _ in spare:
        pool.discard(slot, ticket)
    pool.forget()
    assert pool.free == pool.count


def test_a_ticket_is_for_one_state() -> None:
    pool = StatePool(1, 0)
    first = pool.spare(slot := pool.take())
    second = pool.spare(pool.take())
    assert first is not None and second is not None
    assert not pool.back(slot, first) and pool.back(slot, second) and not pool.back(slot, second)


def test_snapshots_spread_over_a_long_text() -> None:
    pool, held = StatePool(6, 4), -1
    for i in range(40):
        slot = pool.take()
        if held >= 0:
            pool.spare(held)
        held = slot
        pool.keep(bytes([i]), held, Place(b"", 512 * (i + 1)), 1)
    there = sorted(place.position for place, _ in pool.places())
    assert len(there) == 4 and there[-2:] == [512 * 39, 512 * 40] and there[0] <= 10_000


def test_one_text_does_not_take_the_snapshots_of_all_others() -> None:
    pool = StatePool(8, 5)
    for line, steps in ((1, 1), (2, 1), (3, 9)):
        for i in range(steps):
            slot = pool.take()
            pool.keep(bytes([line, i]), slot, Place(b"", 100 * (i + 1)), line)
            pool.release(slot)
    assert pool.find(bytes([1, 0])) is not None and pool.find(bytes([2, 0])) is not None
    assert pool.find(bytes([3, 8])) is not None


def test_a_slot_is_taken_where_least_is_lost() -> None:
    """Free ones first, then spare ones, the oldest first, and snapshots at last, the least recently used first."""
    pool = StatePool(5, 2)
    evicted: list[bytes] = []
    pool.on_evict = lambda slot, key: evicted.append(key)
    slots = [pool.take() for _ in range(4)]
    for key, slot in zip((b"a", b"b"), slots, strict=False):
        pool.keep(key, slot, Place(b"", 64), line=slot)
        pool.release(slot)
    older, younger = (pool.spare(slot) for slot in slots[2:])
    assert older is not None and younger is not None
    assert pool.take() not in slots and pool.has(slots[2], older)
    assert pool.take() == slots[2] and pool.has(slots[3], younger)
    assert pool.take() == slots[3] and not evicted
    pool.find(b"a")
    assert pool.take() == slots[1] and evicted == [b"b"]
    assert pool.take() == slots[0] and evicted == [b"b", b"a"]
    with pytest.raises(PoolFull):
        pool.take()
    assert pool.counts.evicted == 2 and pool.counts.most_held == pool.count


@pytest.mark.parametrize("use", ["find", "keep"])
def test_a_snapshot_that_is_used_again_stays_longer(use: str) -> None:
    pool = StatePool(4, 2)
    for key in (b"a", b"b"):
        slot = pool.take()
        pool.keep(key, slot, Place(b"", 64), line=slot)
        pool.release(slot)
    if use == "find":
        pool.find(b"a")
    else:
        pool.keep(b"a", pool.take(), Place(b"", 64), line=9)
    pool.keep(b"c", pool.take(), Place(b"", 64), line=8)
    assert pool.slot_of(b"a") is not None and pool.slot_of(b"b") is None


def test_snapshots_where_a_sequence_stands_are_not_dropped_for_a_slot() -> None:
    pool = StatePool(3, 3)
    held, left = pool.take(), pool.take()
    pool.keep(b"held", held, Place(b"", 64), line=1)
    pool.keep(b"left", left, Place(b"", 64), line=2)
    pool.find(b"left")
    pool.release(left)
    pool.take()
    assert pool.take() == left and pool.slot_of(b"held") == held
