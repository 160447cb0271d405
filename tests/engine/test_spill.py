"""Laws of pages that are evicted before they were written: their copies are what was there, and are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from ktcli.engine import writeback
from ktcli.engine.pages import PagePool
from ktcli.engine.tier import Tier
from ktcli.errors import DeviceError
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.store.readrate import ReadRate

PAGE_BYTES = 64


class Memory:
    """Pages of a few bytes, of which it is counted how often they were asked for."""

    page_bytes, state_bytes, codec = PAGE_BYTES, 0, "test"

    def __init__(self, count: int) -> None:
        self.pages = np.zeros((count, PAGE_BYTES), np.uint8)
        self.saved = 0

    def saved_page(self, page: int) -> U8Array:
        self.saved += 1
        return self.pages[page]

    def page_room(self, page: int) -> U8Array:
        return self.pages[page]

    def restore_page(self, page: int, room: U8Array) -> None: ...
    def saved_state(self, slot: int) -> U8Array:
        raise AssertionError("there are no states")

    state_room = saved_state

    def restore_state(self, slot: int, room: U8Array) -> None: ...


class Store:
    """A store whose thread writes when the test says so.

    Attributes:
        there: what others wrote.
    """

    rate = ReadRate()

    def __init__(self, name: str) -> None:
        self.name = name
        self.due: dict[bytes, Fill] = {}
        self.there: set[bytes] = set()

    def has(self, kind: int, key: bytes) -> bool:
        return key in self.there

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        assert size_bytes == PAGE_BYTES
        self.due[label.key] = fill
        return True

    def write(self, key: bytes) -> bytes | None:
        """The bytes that are written of a record; None: they are gone."""
        into = np.zeros(PAGE_BYTES, np.uint8)
        return into.tobytes() if self.due.pop(key)(into) else None

    def refresh(self) -> None: ...
    def seek(self, labels: Iterable[PageLabel]) -> None: ...
    def states(self) -> Sequence[tuple[int, bytes, bytes]]:
        return ()

    def read(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        return 0

    def use(self, keys: Iterable[bytes]) -> None: ...
    def hurry(self) -> None: ...
    def flush(self, wait_s: float) -> bool:
        return True


class Engine:
    """A pool with a tier below it."""

    def __init__(self, count: int, *others: Store) -> None:
        self.pool, self.memory, self.store = PagePool(count), Memory(count), Store("near")
        self.tier = Tier([self.store, *others], self.memory, self.pool, None)

    def leave(self, *names: int) -> None:
        """Each becomes a page that is full of its name, is sealed, and that nobody holds."""
        for name in names:
            (page,) = self.pool.take(1)
            self.memory.pages[page] = name
            key = bytes([name])
            self.pool.seal(page, key)
            none = np.zeros(0, np.int32)
            label = PageLabel(PageKind.PAGE, key, b"", 64, none, none.astype(np.uint8))
            self.tier.sealed(page, label)
            self.pool.release(page)

    def written(self, *names: int) -> list[int]:
        """Which of these can still be written, all as they were left."""
        found = {name: self.store.write(bytes([name])) for name in names}
        there = {name: data for name, data in found.items() if data is not None}
        assert all(data == bytes([name]) * PAGE_BYTES for name, data in there.items())
        return list(there)


def test_what_is_evicted_before_it_was_written_is_written_as_it_was() -> None:
    engine = Engine(2)
    engine.leave(1, 2, 3)  # in the place of 1
    assert engine.written(1, 2, 3) == [1, 2, 3]


def test_what_a_device_that_failed_does_not_give_back_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(2)

    def lost(page: int) -> U8Array:
        raise DeviceError("the GPU is lost")

    engine.leave(1, 2)
    with monkeypatch.context() as failing:
        failing.setattr(engine.memory, "saved_page", lost)
        engine.leave(3)  # in the place of 1
    assert engine.written(1, 2, 3) == [2, 3]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_copies_are_bounded_and_the_oldest_is_given_up(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "_SPILL_BYTES", limit * PAGE_BYTES)
    engine = Engine(2)
    engine.leave(*range(1, 8))  # the last two still have their places
    assert engine.written(*range(1, 8)) == list(range(6 - limit, 8))


def test_what_was_written_makes_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_SPILL_BYTES", 2 * PAGE_BYTES)
    engine = Engine(2)
    engine.leave(1, 2, 3, 4)
    assert engine.written(1, 2) == [1, 2]
    engine.leave(5, 6)
    assert engine.written(3, 4, 5, 6) == [3, 4, 5, 6]


def test_nothing_is_copied_that_is_written_already() -> None:
    engine = Engine(2)
    engine.leave(1, 2)
    assert engine.written(1) == [1]
    engine.store.there.add(b"\x02")  # by another process
    before = engine.memory.saved
    engine.leave(3, 4)
    assert engine.memory.saved == before
    assert engine.written(2, 3, 4) == [3, 4]


def test_a_page_that_is_written_to_again_is_stored_as_it_was_sealed() -> None:
    engine = Engine(2)
    engine.leave(1)
    page = engine.pool.find(b"\x01")
    assert page is not None
    engine.pool.hold(page)
    engine.pool.unseal(page)
    engine.memory.pages[page] = 9
    assert engine.written(1) == [1]


def test_what_one_store_has_taken_waits_for_the_other() -> None:
    far = Store("far")
    engine = Engine(2, far)
    engine.leave(1, 2)
    assert engine.written(1, 2) == [1, 2]
    engine.leave(3, 4)  # in the places of both
    assert [far.write(bytes([name])) for name in (1, 2, 3)] == [
        bytes([name]) * PAGE_BYTES for name in (1, 2, 3)
    ]
    assert engine.written(3, 4) == [3, 4]


def test_a_store_that_takes_nothing_keeps_no_copies_waiting() -> None:
    class Full(Store):
        def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
            return False

    engine = Engine(2, Full("far"))
    engine.leave(1, 2)
    assert engine.written(1, 2) == [1, 2]
    before = engine.memory.saved
    engine.leave(3, 4)
    assert engine.memory.saved == before


def test_nothing_is_copied_any_more_when_the_memory_goes_away() -> None:
    engine = Engine(2)
    engine.leave(1, 2)
    engine.tier.detach()
    assert engine.written(1, 2) == []
