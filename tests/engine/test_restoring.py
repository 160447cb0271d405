"""Laws of sequences above a store: in whatever order they are fed, forked, cut, forgotten and come back, each
computes, bit for bit, what a timeline computes that was never left."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.test_sharing import (
    ACTS,
    CONTEXT,
    EACH,
    LINES,
    MOST_CHECKED,
    PROBE,
    TEXTS,
    Step,
    World,
    engine_of,
    never_left,
)
from hybrid import Made
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_engine
from timelines import advance

from ktcli.assembly.kvpages import store_below
from ktcli.engine import CpuEngine
from ktcli.engine.pages import PoolFull
from ktcli.pagelabel import PageKind, U8Array
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore

pytestmark = pytest.mark.in_turn("engine")
# A line ends, memory forgets, and the line comes back.
BACK = st.tuples(st.just("back"), st.integers(0, 2), st.integers(100, CONTEXT))
FEED = st.tuples(st.just("feed"), st.integers(0, 2), st.sampled_from([64, 90, 130]))
SCHEDULES = st.lists(st.tuples(st.integers(0, LINES), ACTS | FEED | BACK), min_size=5, max_size=25)


@pytest.fixture(scope="module", params=EACH)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    return engine_of(request.param, tmp_path_factory)


class Recording:
    """The memory of an engine, and which pages and states came back into it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.pages: set[int] = set()
        self.slots: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def restore_page(self, page: int, room: U8Array) -> None:
        self.pages.add(page)

    def restore_state(self, slot: int, room: U8Array) -> None:
        self.slots.add(slot)


class StoredWorld(World):
    """A world above a store, to which everything is written at once: it has what was sealed first under each key."""

    def __init__(self, engine: CpuEngine, store: PageStore) -> None:
        super().__init__(engine)
        self.store = store
        self.first_pages: dict[bytes, list[Step]] = {}
        self.first_states: dict[bytes, Step | None] = {}
        self.restored = 0  # pages

    def act(self, at: int, what: str, a: int, b: int) -> None:
        pools = self.engine.pools
        if what == "back":
            self.act(at, "close", 0, 0)
            pools.forget()
            what = "adopt"
        before = self._places()
        tier = pools.tier
        assert tier is not None
        tier._memory.own = came = Recording(self.engine.memory)
        kinds = tier._memory.kinds
        kinds[PageKind.PAGE] = replace(kinds[PageKind.PAGE], memory=came)
        try:
            super().act(at, what, a, b)
        finally:
            pages, states = self._places()
            for key, page in pages.items() - before[0].items():
                if page in came.pages:
                    self.by[page] = list(self.first_pages[key])
                self.first_pages.setdefault(key, list(self.by[page]))
            for key, slot in states.items() - before[1].items():
                if slot in came.slots:
                    self.left[slot] = self.first_states[key]
                self.first_states.setdefault(key, self.left[slot])
            tier.turn_over()
            assert self.store.flush()
            self.restored += len(came.pages)

    def _places(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """The page of each key, and the slot."""
        pools = self.engine.pools
        states = {} if pools.states is None else pools.states._snapshots
        return dict(pools.pages._pages), {key: each.slot for key, each in states.items()}


def check(engine: CpuEngine, schedule, folder: PageFolder) -> None:
    engine.pools.forget()
    with store_below(engine, folder, 1 << 40, "m") as store:
        world, found = StoredWorld(engine, store), []
        try:
            for at, (what, a, b) in schedule:
                with suppress(PoolFull):
                    world.act(at, what, a, b)
            for line in world.lines:
                line.truncate(CONTEXT - 1)
                with suppress(PoolFull):
                    run = world.extended(line, PROBE)
                    steps = [*world.steps(line), world.step(line, run)]
                    found.append((steps, world.computed((line, run))[0]))
        finally:
            for line in world.lines:
                line.close()
        assert store.counts.damaged == 0
        found += world.drafted[-MOST_CHECKED:]
    engine.pools.forget()
    assert engine.pools.pages.free == engine.pools.pages.count
    assert engine.pools.states is None or engine.pools.states.free == engine.pools.states.count
    for steps, logits in found:
        np.testing.assert_array_equal(logits, never_left(engine, steps))


@settings(max_examples=8, deadline=None)
@given(SCHEDULES)
def test_what_comes_back_is_what_was_never_left(
    engine: CpuEngine, tmp_path_factory: pytest.TempPathFactory, schedule
) -> None:
    check(engine, schedule, PageFolder(tmp_path_factory.mktemp("kv") / "kv"))


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(SCHEDULES)
def test_what_comes_back_is_what_was_never_left_in_many_schedules(
    engine: CpuEngine, tmp_path_factory: pytest.TempPathFactory, schedule
) -> None:
    check(engine, schedule, PageFolder(tmp_path_factory.mktemp("kv") / "kv"))


def test_pages_of_another_format_are_never_used(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A model whose cache is fp8 finds its own pages, which take half of the bytes, and none of bf16, in one folder."""
    made = Made.convert("qwen3", tmp_path_factory.mktemp("formats"))
    folder, ids = PageFolder(tmp_path), TEXTS[0][:200].tolist()
    engines = {
        cache: load_engine(made.path, context=CONTEXT, threads=1, cache=cache)
        for cache in ("bf16", "fp8")
    }
    spec, memory = engines["fp8"].spec, {name: each.memory for name, each in engines.items()}
    assert memory["fp8"].page_bytes <= memory["bf16"].page_bytes / 2 + 64 * (
        spec.position_heads + spec.layers
    )
    answers = {}
    for cache in ("bf16", "fp8", "bf16", "fp8"):
        engine = engines[cache]
        engine.pools.forget()
        with store_below(engine, folder, 1 << 40, "m") as store:
            session = engine.session()
            logits, reused = advance(session, ids)
            assert reused == (128 + 64 if cache in answers else 0)
            assert answers.setdefault(cache, logits.values.tobytes()) == logits.values.tobytes()
            assert store.flush()
            del session
    assert answers["bf16"] != answers["fp8"]
