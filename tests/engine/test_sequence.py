"""Laws of sequences on shared pools: whatever they do, each finds in its pages and states what it would have computed
alone. Judged by a machine that writes into every position and state which ids led there."""

from __future__ import annotations

import gc
import random
import threading
from contextlib import suppress
from itertools import accumulate

import numpy as np
import pytest
from engine.toy import ToyEngine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.engine.pagetable import WindowPages, pages_for
from ktcli.engine.pools import Pools
from ktcli.engine.prefix import chain, seed
from ktcli.engine.sequence import Sequence
from ktcli.engine.session import Session
from ktcli.engine.statepool import StatePool
from ktcli.errors import ContextFull, DeviceError
from ktcli.native.operands import Run

PAGE = 64
CONTEXT = 600
Prefix = tuple[tuple[int, int], ...]  # (id, depth) pairs


class Machine:
    """Pools whose pages and states hold the prefixes that they were computed from.

    Args:
        window: the positions of the layers with a window; 0: there are none.
        window_pages: the pages of those.
    """

    def __init__(
        self,
        pages: int,
        slots: int = 0,
        snapshots: int = 4,
        *,
        window: int = 0,
        window_pages: int = 9,
    ) -> None:
        self.windows: list[list[int]] = [[0] * PAGE for _ in range(window_pages)]
        self.memory: list[list[int]] = [[0] * PAGE for _ in range(pages)]  # a hash of the prefix
        self.states = [0] * slots
        self.copies = 0
        states = StatePool(slots, snapshots) if slots else None
        self.pools = Pools(PagePool(pages), states, self._copy, seed({}), CONTEXT)
        if window:
            pool = PagePool(window_pages)
            self.pools.windows = WindowPages(pool, self._copy_window, window)

    def _copy_window(self, of: int, to: int) -> None:
        self.windows[to] = list(self.windows[of])

    def _copy(self, of: int, to: int) -> None:
        self.copies += 1
        self.memory[to] = list(self.memory[of])

    def sequence(self) -> Sequence:
        return Sequence(self.pools)

    def run(self, run: Run, before: Prefix) -> Prefix:
        """Computes a run that should begin after `before`; returns what is before its end."""
        assert run.start == len(before) and len(run.pages) == pages_for(run.start + run.ids.size)
        held = [self.memory[run.pages[at // PAGE]][at % PAGE] for at in range(run.start)]
        assert held == hashes(before)
        kinds = [(self.memory, self.pools.pages, run.pages)]
        if self.pools.windows is not None:
            assert run.window_pages is not None and len(run.window_pages) == len(run.pages)
            first = max(0, run.start + 1 - self.pools.windows.window)
            kept = [
                self.windows[run.window_pages[at // PAGE]][at % PAGE]
                for at in range(first, run.start)
            ]
            assert kept == hashes(before)[first:] and min(run.window_pages[first // PAGE :]) >= 0
            kinds.append((self.windows, self.pools.windows.pool, run.window_pages))
        if self.states:
            assert run.next_state >= 0 and run.next_state != run.state
            assert (run.state < 0) == (run.start == 0)
            assert run.state < 0 or self.states[run.state] == hash(before)
        after = (*before, *((int(id), run.defer) for id in run.ids))
        values = hashes(after)
        for at in range(run.start, len(after)):
            for memory, pool, table in kinds:
                page = int(table[at // PAGE])
                assert pool.holders(page) == 1 and not pool.sealed(page)
                memory[page][at % PAGE] = values[at]
        if self.states:
            assert self.pools.states is not None
            self.states[run.next_state] = hash(after)
        return after


def hashes(prefix: Prefix) -> list[int]:
    """A number for each beginning of a prefix."""
    return list(accumulate(prefix, lambda value, each: hash((value, each)), initial=1))[1:]


def keys(prefix: Prefix) -> tuple[bytes, ...]:
    """The keys of its full pages."""
    found = [seed({})]
    for first in range(0, len(prefix) // PAGE * PAGE, PAGE):
        ids, depths = zip(*prefix[first : first + PAGE], strict=True)
        found.append(chain(found[-1], np.array(ids, np.int32), np.array(depths, np.uint8)))
    return tuple(found[1:])


def fed(
    machine: Machine, sequence: Sequence, before: Prefix, ids: list[int], defer: int = 0
) -> Prefix:
    run = sequence.extend(np.array(ids, dtype=np.int32), defer=defer)
    after = machine.run(run, before)
    sequence.commit(run)
    return after


TEXTS = [np.random.default_rng(i // 2).integers(0, 3, 500).tolist() for i in range(4)]
for i in (1, 3):  # some texts begin alike
    TEXTS[i] = [*TEXTS[i][: 90 * i], *np.random.default_rng(9 + i).integers(0, 3, 300).tolist()]

OPERATIONS = st.one_of(
    st.tuples(
        st.just("feed"), st.integers(0, 3), st.sampled_from([1, 1, 1, 2, 16, 63, 64, 65, 150])
    ),
    st.tuples(st.just("defer"), st.integers(1, 2), st.integers(1, 70)),
    st.tuples(st.just("fail"), st.integers(0, 3), st.integers(1, 130)),
    st.tuples(st.just("truncate"), st.just(0), st.integers(0, 500)),
    st.tuples(st.just("fork"), st.just(0), st.just(0)),
    st.tuples(st.just("adopt"), st.integers(0, 3), st.integers(1, 400)),
    st.tuples(st.just("keep"), st.just(0), st.just(0)),
    st.tuples(st.just("close"), st.just(0), st.just(0)),
    st.tuples(st.just("open"), st.just(0), st.just(0)),
)


# (slots for states, positions of the layers with a window)
KINDS = pytest.mark.parametrize(("slots", "window"), [(0, 0), (9, 0), (0, 70), (0, 128), (9, 65)])


@KINDS
@settings(max_examples=40, deadline=None)
@given(schedule=st.lists(st.tuples(st.integers(0, 5), OPERATIONS), max_size=60))
# Its own deferred tokens are found again while it still has the pages of a step that failed.
@example([(0, ("defer", 0, 10)), (0, ("fail", 0, 130)), (0, ("adopt", 0, 100))])
def test_each_sequence_finds_what_it_would_have_alone(slots: int, window: int, schedule) -> None:
    check(Machine(14, slots, window=window), schedule)


WALK = "feed feed feed feed defer fail truncate truncate fork adopt adopt keep close open".split()


@pytest.mark.each_once
@KINDS
@pytest.mark.parametrize("walk", range(4))
def test_a_long_walk_ends_with_the_pages_that_were_free(slots: int, window: int, walk: int) -> None:
    draw = random.Random(walk)
    sizes = [1, 1, 2, 16, 63, 64, 65, 150, 300]
    check(
        Machine(14, slots, window=window),
        [
            (draw.randrange(6), (draw.choice(WALK), draw.randrange(4), draw.choice(sizes)))
            for _ in range(1250)
        ],
    )


@pytest.mark.thorough
@KINDS
@settings(max_examples=200, deadline=None)
@given(schedule=st.lists(st.tuples(st.integers(0, 5), OPERATIONS), min_size=20, max_size=150))
def test_each_sequence_finds_what_it_would_have_alone_in_long_schedules(
    slots: int, window: int, schedule
) -> None:
    check(Machine(14, slots, window=window), schedule)


def check(machine: Machine, schedule) -> None:
    alive: list[tuple[Sequence, Prefix]] = [(machine.sequence(), ())]
    for which, (what, a, b) in schedule:
        at = which % len(alive)
        sequence, prefix = alive[at]
        with suppress(PoolFull, ContextFull):
            alive[at] = sequence, acted(machine, alive, at, what, a, b)
        if what == "close":
            sequence.close()
            alive[at] = machine.sequence(), ()
        sequence, prefix = alive[at]
        assert sequence.ids == tuple(id for id, _ in prefix) and sequence.keys == keys(prefix)
        assert len(sequence.pages) >= pages_for(len(prefix))
    for sequence, _ in alive:
        sequence.close()
    assert machine.pools.pages.held == 0
    machine.pools.forget()
    assert machine.pools.pages.free == machine.pools.pages.count
    assert machine.pools.states is None or machine.pools.states.free == machine.pools.states.count
    windows = machine.pools.windows
    assert windows is None or windows.pool.free == windows.pool.count


def acted(machine: Machine, alive, at: int, what: str, a: int, b: int) -> Prefix:
    """One operation; returns what the sequence holds afterwards."""
    sequence, prefix = alive[at]
    text = TEXTS[a % 4][len(prefix) : len(prefix) + b] or [0]
    match what:
        case "feed":
            return fed(machine, sequence, prefix, text)
        case "defer":
            return fed(machine, sequence, prefix, text, defer=1 + a % 2)
        case "fail":
            machine.run(sequence.extend(np.array(text, dtype=np.int32)), prefix)
        case "truncate":
            reached = sequence.truncate(b)
            back = machine.states or machine.pools.windows
            assert reached == min(b, len(prefix)) or (back and reached < b)
            return prefix[:reached]
        case "fork" if len(alive) < 6:
            alive.append((sequence.fork(), prefix))
        case "adopt":
            ids, before = TEXTS[a][:b], sequence.pages
            reused = sequence.adopt(ids)
            assert reused < len(ids)
            # What it held itself stays as it was; anything else was computed without deferral.
            n = pages_for(reused)
            own = sequence.pages[:n] == before[:n] and reused <= len(prefix)
            return prefix[:reused] if own else tuple((id, 0) for id in ids[:reused])
        case "keep":
            sequence.keep()
        case "open" if len(alive) < 6:
            alive.append((machine.sequence(), ()))
    return prefix


def test_a_long_answer_holds_its_window_and_finds_its_beginning_again() -> None:
    machine = Machine(10, window=100, window_pages=8)
    sequence = machine.sequence()
    prefix = fed(machine, sequence, (), TEXTS[0][:200])  # a prompt
    for token in range(390):
        prefix = fed(machine, sequence, prefix, [token])
        assert len(sequence.window_pages) <= 3
    assert machine.pools.windows is not None and machine.pools.windows.pool.held <= 3
    assert (
        sequence.truncate(200) == 192
    )  # the page that 200 lies in is gone, those before the border were favoured
    prefix = fed(machine, sequence, prefix[:192], [7] * 90)
    sequence.close()
    assert machine.pools.windows.pool.held == 0
    fresh = machine.sequence()
    assert fresh.adopt([*TEXTS[0][:192], 8, 9]) == 192
    assert len(fresh.pages) == 3 and len(fresh.window_pages) == 2


def test_four_forks_share_a_long_chat() -> None:
    machine = Machine(200)
    pools = machine.pools = Pools(machine.pools.pages, None, machine._copy, seed({}), 8192)
    first = Sequence(pools)
    prefix = fed(machine, first, (), list(range(8000)))
    alone = pools.pages.held
    forks = [first.fork() for _ in range(4)]
    for i, fork in enumerate(forks):
        fed(machine, fork, prefix, [i] * 50)
    fed(machine, first, prefix, [9])
    assert pools.pages.held <= 1.1 * alone
    assert machine.copies == 0  # 8000 is a multiple of 64


def test_a_page_that_is_not_full_is_copied_by_who_writes_first() -> None:
    machine = Machine(10)
    first = machine.sequence()
    prefix = fed(machine, first, (), [1] * 70)
    fork = first.fork()
    assert machine.pools.pages.held == 2
    fed(machine, first, prefix, [2])
    assert (machine.copies, machine.pools.pages.held) == (1, 3)
    fed(machine, fork, prefix, [3])
    assert machine.copies == 1  # it is the only one left with it


def test_equal_beginnings_are_computed_once() -> None:
    machine = Machine(20)
    first, second = machine.sequence(), machine.sequence()
    fed(machine, first, (), TEXTS[0][:200])
    assert second.adopt(TEXTS[0][:200]) == 192 and second.pages == first.pages[:3]
    first.close()
    third = machine.sequence()
    assert third.adopt(TEXTS[0][:192]) == 191  # the last id is left to compute
    assert third.adopt(TEXTS[0][:400]) == 200  # what was computed of a page that is not full, too
    assert third.adopt([5, *TEXTS[0][:192]]) == 0 and third.pages == ()


@pytest.mark.parametrize("window", [0, 70])
def test_a_page_is_shared_as_far_as_it_is_equal(window: int) -> None:
    """An answer's thoughts, say, are left out of the next prompt, which goes on with the answer in their place."""
    machine = Machine(20, window=window)
    first = machine.sequence()
    before = fed(machine, first, (), TEXTS[0][:200])
    fed(machine, first, before, [7] * 120)
    first.close()
    for ids, common in (
        ([*TEXTS[0][:200], *[8] * 50], 200),
        ([*TEXTS[0][:130], *[9] * 90], 130),
        ([*TEXTS[0][:200], *[7] * 30], 229),
        ([*TEXTS[0][:200], *[7] * 120, 5, 6], 320),
        ([4, *TEXTS[0][1:200]], 0),
    ):
        second = machine.sequence()
        assert second.adopt(ids) == common
        prefix = tuple((id, 0) for id in ids)
        fed(machine, second, prefix[:common], ids[common:])
        second.close()


@KINDS
def test_only_equal_salts_share(slots: int, window: int) -> None:
    machine = Machine(30, slots, window=window, window_pages=30)
    for salt in ("", "mine", "yours"):
        sequence = machine.sequence()
        assert sequence.adopt(TEXTS[0][:200], salt=salt) == 0
        fed(machine, sequence, (), TEXTS[0][:192])
        sequence.close()
        again = machine.sequence()
        assert again.adopt(TEXTS[0][:200], salt=salt) == 192
        assert again.fork().adopt(TEXTS[0][:200], salt=salt) == 192
        again.close()
    changing = machine.sequence()
    assert changing.adopt(TEXTS[0][:200], salt="mine") == 192
    assert changing.adopt(TEXTS[0][:200], salt="another") == 0 and changing.pages == ()


def test_a_hit_is_cut_back_to_the_newest_snapshot() -> None:
    machine = Machine(20, slots=9)
    first, second = machine.sequence(), machine.sequence()
    prefix = fed(machine, first, (), TEXTS[0][:100])  # a snapshot
    for token in TEXTS[0][100:300]:
        prefix = fed(machine, first, prefix, [token])
    assert second.adopt(TEXTS[0][:290]) == 100
    first.keep()
    assert second.adopt(TEXTS[0][:350]) == 300
    assert first.fork().ids == second.ids


def test_the_third_who_begins_alike_finds_a_state_there() -> None:
    """The second one sees where the pages of the first end, and leaves a state; so does a mark."""
    machine = Machine(30, slots=9)
    texts = [[*TEXTS[0][:150], *[i] * 70] for i in range(3)]
    found = []
    for ids in texts:
        sequence, prefix = machine.sequence(), ()
        found.append(sequence.adopt(ids))
        prefix = tuple((id, 0) for id in ids[: found[-1]])
        while len(prefix) < len(ids):
            n = sequence.until_mark(len(ids) - len(prefix))
            prefix = fed(machine, sequence, prefix, ids[len(prefix) : len(prefix) + n])
        sequence.close()
    assert found == [0, 0, 128]
    first, second = machine.sequence(), machine.sequence()
    first.mark(100)
    assert first.until_mark(300) == 100
    prefix = fed(machine, first, (), TEXTS[2][:100])
    assert first.until_mark(300) == 300
    fed(machine, first, prefix, [1] * 100)
    assert second.adopt([*TEXTS[2][:100], 2, 2]) == 100


def test_marks_that_are_not_worth_a_step_are_left_out() -> None:
    """Of a prompt of 200, 40 of which are known: those right behind them and in the tail."""
    machine = Machine(30, slots=9)
    first, second = machine.sequence(), machine.sequence()
    fed(machine, first, (), TEXTS[0][:40])
    first.keep()
    assert second.adopt(TEXTS[0][:200], None, [30, 55, 56, 120, 184, 185, 199]) == 40
    ends = []
    prefix = tuple((id, 0) for id in TEXTS[0][:40])
    while len(prefix) < 200:
        n = second.until_mark(200 - len(prefix))
        prefix = fed(machine, second, prefix, TEXTS[0][len(prefix) : len(prefix) + n])
        ends.append(len(prefix))
    assert ends == [56, 120, 184, 200]


def test_what_was_deferred_is_found_only_as_such() -> None:
    machine = Machine(20)
    first, second = machine.sequence(), machine.sequence()
    prefix = fed(machine, first, (), TEXTS[0][:64])
    fed(machine, first, prefix, TEXTS[0][64:128], defer=2)
    assert second.adopt(TEXTS[0][:200]) == 64
    depths = np.array([0] * 64 + [2] * 136, dtype=np.uint8)
    assert second.adopt(TEXTS[0][:200], depths) == 128


def test_a_full_pool_changes_nothing() -> None:
    machine = Machine(3)
    first, second = machine.sequence(), machine.sequence()
    prefix = fed(machine, first, (), [1] * 130)
    with pytest.raises(PoolFull):
        fed(machine, second, (), [2])
    assert second.ids == () and second.pages == ()
    fed(machine, first, prefix, [3] * 62)
    with pytest.raises(PoolFull):
        first.extend(np.zeros(1, np.int32))
    first.close()
    fed(machine, second, (), [2])


def test_the_key_depends_on_every_id_every_depth_and_every_fact() -> None:
    ids, depths = np.arange(64, dtype=np.int32), np.zeros(64, np.uint8)
    start = seed({"weights": "a"})
    key = chain(start, ids)
    assert key == chain(start, ids, depths)
    assert (
        len({key, chain(seed({"weights": "b"}), ids), chain(key, ids), chain(start, ids[:63])}) == 4
    )
    for at in range(64):
        other, deep = ids.copy(), depths.copy()
        other[at] += 1
        deep[at] = 1
        assert key not in (chain(start, other), chain(start, ids, deep))


def test_a_session_that_is_collected_within_an_operation_is_closed_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = ToyEngine()
    kept, dropped = (Session(toy) for _ in range(2))  # type: ignore[arg-type]
    dropped.feed([1] * 150)
    dropped.itself = dropped  # type: ignore[attr-defined]  # which only the collector undoes
    free, during = toy.pools.pages.available, []
    take = toy.pools.pages.take

    def taken(n: int) -> list[int]:
        gc.collect()
        during.append(toy.pools.pages.available)
        return take(n)

    del dropped
    monkeypatch.setattr(type(toy.pools.pages), "take", lambda self, n: taken(n))
    kept.sequence.extend(np.array([1], np.int32))
    assert during == [free]
    assert toy.pools.pages.available == free + 3 - 1 and not toy.pools.waiting


def test_a_session_that_another_thread_collects_is_closed_by_the_next_operation() -> None:
    """The other thread may hold a lock that closing takes."""
    toy = ToyEngine()
    dropped = [Session(toy)]  # type: ignore[arg-type]
    dropped[0].feed([1] * 150)
    free = toy.pools.pages.available
    collector = threading.Thread(target=dropped.clear)
    collector.start()
    collector.join()
    assert toy.pools.pages.available == free and len(toy.pools.waiting) == 1
    assert toy.pools.available[0] == free + 3 and not toy.pools.waiting


def test_closing_what_a_failed_device_held_disturbs_no_operation() -> None:
    toy = ToyEngine()

    def close() -> None:
        raise DeviceError("gone")

    session = Session(toy)  # type: ignore[arg-type]
    toy.pools.later(close)
    session.feed([1])
    assert not toy.pools.waiting and not toy.pools.depth
