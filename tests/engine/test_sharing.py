"""Laws of sequences on a loaded model: whoever shares, forks, goes back or comes again computes, bit for bit, what a
timeline computes that was never left. Judged by the same program on pages and states of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hybrid import Made
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_engine
from numpy.typing import NDArray
from timelines import advance

from ktcli.engine import CpuEngine
from ktcli.engine.pages import PoolFull
from ktcli.engine.pagetable import pages_for
from ktcli.engine.sequence import Sequence
from ktcli.native import PAGE_TOKENS, Batch, Run

CONTEXT, STREAMS, LINES = 320, 4, 3
MOST_DRAFTED, MOST_CHECKED = 4, 3  # tokens of a step; drafts of a schedule
PROBE = np.array([3], np.int32)
Ids = NDArray[np.int32]
# Grouped and latent attention, windows, states, pooled windows, chosen positions and blocks.
FAMILIES = "qwen3 deepseek-v3 gpt-oss qwen3-next deepseek-v4".split()
CODED = ("deepseek-v3", "gpt-oss")  # with an fp8 cache too
MORE = "deepseek-v3.2 glm-5.3 minimax-m3 mimo-v2-flash ling-3 laguna".split()
EACH = [
    *FAMILIES,
    *(f"{name} fp8" for name in CODED),
    *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE),
]


def texts() -> list[Ids]:
    """Three texts that begin alike."""
    draw = np.random.default_rng(7)
    found = [draw.integers(0, 99, CONTEXT).astype(np.int32) for _ in range(3)]
    found[1][:130] = found[0][:130]
    found[2][:40] = found[0][:40]
    return found


TEXTS = texts()


def engine_of(each: str, folders: pytest.TempPathFactory) -> CpuEngine:
    """An engine with a model of one of EACH."""
    name, cache = f"{each} bf16".split()[:2]
    made = Made.convert(name, folders.mktemp(name))
    return load_engine(made.path, context=CONTEXT, threads=1, streams=STREAMS, defer=1, cache=cache)


@pytest.fixture(scope="module", params=EACH)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    return engine_of(request.param, tmp_path_factory)


@dataclass(frozen=True, eq=False)
class Step:
    """A run as it was computed; what is left of it may be less.

    Attributes:
        before: the step that computed the position before it; None: it begins at 0.
        state: the step whose state it read; None: none.
        drafted: whether each token gives what it gives alone.
        expanded: its positions that were expanded, first and end.
    """

    start: int
    ids: tuple[int, ...]
    defer: int
    before: Step | None = None
    state: Step | None = None
    drafted: bool = False
    expanded: tuple[int, int] = (0, 0)

    def spans(self, end: int) -> list[tuple[int, int]]:
        """Its part up to position `end`, as what is computed in one step: drafted tokens one by one."""
        if self.drafted:
            return [(at, at + 1) for at in range(self.start, end)]
        return [(self.start, end)]

    def run(
        self,
        span: tuple[int, int],
        pages: Ids,
        states: tuple[int, int],
        windows: Ids | None = None,
    ) -> Run:
        """A span of it, as a piece of all of it.

        Args:
            states: the slots to read and to write.
            windows: the pages of the layers with a window.
        """
        first, end = span
        ids = np.array(self.ids, np.int32)[first - self.start : end - self.start]
        chunk = (first, 1) if self.drafted else (self.start, len(self.ids))
        return Run(
            ids, first, pages, ids.size - 1, 0.0, self.defer, *states, chunk, windows, self.expanded
        )


class World:
    """Sequences of an engine, and what is known of who computed what: each position of each page remembers its step."""

    def __init__(self, engine: CpuEngine) -> None:
        self.engine = engine
        self.by = [[Step(0, (), 0)] * PAGE_TOKENS for _ in range(engine.pools.pages.count)]
        slots = engine.pools.states.count if engine.pools.states else 0
        self.left: list[Step | None] = [None] * slots  # who left which state
        self.lines = [engine.sequence()]
        # Steps, and the logits of the last of several outputs after them.
        self.drafted: list[tuple[list[Step], NDArray[np.float32]]] = []

    def feed(self, line: Sequence, ids: Ids, defer: int = 0) -> NDArray[np.float32]:
        """Computes ids; returns the logits after them."""
        return self.computed((line, self.extended(line, ids, defer)))[0]

    def together(self, a: int, b: int) -> None:
        """All sequences that have room go on in one step, each with its own text and so many ids, some drafted."""
        parts = []
        for i, line in enumerate(self.lines):
            drafted = line.length > 0 and (a + b + i) % 3 == 0
            most = MOST_DRAFTED if drafted else 80
            ids = TEXTS[(a + i) % 3][line.length : line.length + 1 + (b * i) % most]
            with suppress(PoolFull):
                if ids.size:
                    parts.append((line, self.extended(line, ids, i % 2, drafted=drafted)))
        if parts:
            self.computed(*parts)

    def computed(self, *parts: tuple[Sequence, Run]) -> list[NDArray[np.float32]]:
        """Computes runs in one step; returns the logits of each."""
        rows = self.engine.run(Batch(tuple(run for _, run in parts)))
        found = [row.values.copy() for row in rows]
        for line, run in parts:
            step = self.step(line, run)
            line.commit(run)
            if self.left:
                self.left[run.next_state] = step
            for at in range(run.start, line.length):
                self.by[run.pages[at // PAGE_TOKENS]][at % PAGE_TOKENS] = step
        return found

    def draft(self, line: Sequence, ids: Ids, accepted: int) -> None:
        """Tries ids in one step, with logits after each, of which the first ones are accepted."""
        run = self.extended(line, ids, drafted=True)._replace(first_output=0)
        rows = self.engine.run(Batch((run,)))
        step = self.step(line, run)
        step = replace(step, ids=step.ids[:accepted])
        self.drafted.append(([*self.steps(line), step], rows[accepted - 1].values.copy()))
        if self.left and accepted < ids.size:
            return  # the state between them is not known
        line.commit(run, accepted, prompt=False)
        if self.left:
            self.left[run.next_state] = step
        for at in range(run.start, line.length):
            self.by[run.pages[at // PAGE_TOKENS]][at % PAGE_TOKENS] = step

    def extended(self, line: Sequence, ids: Ids, defer: int = 0, *, drafted: bool = False) -> Run:
        before = line.pages
        if not drafted:
            line.plan(ids.size)
        run = line.extend(ids, defer=defer, chunk=(line.length, 1) if drafted else None)
        for old, new in zip(before, line.pages, strict=False):
            if old != new:  # copied, to be written
                self.by[new] = list(self.by[old])
        return run

    def step(self, line: Sequence, run: Run) -> Step:
        """A run as a step."""
        before = self.steps(line)[-1] if line.length else None
        state = self.left[run.state] if self.left and run.state >= 0 else None
        drafted = run.chunk == (run.start, 1)
        ids = tuple(run.ids.tolist())
        return Step(run.start, ids, run.defer, before, state, drafted, run.expanded)

    def steps(self, line: Sequence) -> list[Step]:
        """The steps that computed what it holds, in order."""
        pages = line.pages
        each = (self.by[pages[at // PAGE_TOKENS]][at % PAGE_TOKENS] for at in range(line.length))
        return list(dict.fromkeys(each))

    def act(self, at: int, what: str, a: int, b: int) -> None:
        line = self.lines[at % len(self.lines)]
        text = TEXTS[a % 3][line.length : line.length + b]
        match what:
            case "feed" if text.size:
                self.feed(line, text)
            case "defer" if text.size:
                self.feed(line, text[:1], defer=1)
            case "fail" if text.size:
                self.engine.run(Batch((self.extended(line, text[::-1].copy()),)))
            case "draft" if text.size and line.length:
                ids = text[: 1 + b % MOST_DRAFTED]
                self.draft(line, ids, 1 + (a + b) % ids.size)
            case "truncate":
                line.truncate(b)
            case "open" if len(self.lines) < LINES:
                self.lines.append(self.engine.sequence())
            case "fork" if len(self.lines) < LINES:
                self.lines.append(line.fork())
            case "together":
                self.together(a, b)
            case "keep":
                line.keep()
            case "close":
                line.close()
            case "adopt":
                ids = TEXTS[a % 3][: max(b, 1)]
                reused = line.adopt(ids)
                assert reused < ids.size and line.ids == tuple(ids[:reused].tolist())


def never_left(engine: CpuEngine, steps: list[Step]) -> NDArray[np.float32]:
    """Logits after these steps, on pages that nobody else has."""
    pages, states = engine.pools.pages, engine.pools.states
    own, slots = (
        pages.take(pages_for(CONTEXT)),
        [] if states is None else [states.take(), states.take()],
    )
    pool = engine.pools.windows and engine.pools.windows.pool
    own_windows = pool.take(pages_for(CONTEXT)) if pool else []
    windows = np.array(own_windows, np.int32) if pool else None
    try:
        table, read = np.array(own, np.int32), -1
        ends = [*(step.start for step in steps[1:]), steps[-1].start + len(steps[-1].ids)]
        spans = [
            (step, span) for step, end in zip(steps, ends, strict=True) for span in step.spans(end)
        ]
        for i, (step, span) in enumerate(spans):
            write = slots[i % 2] if slots else -1
            logits = engine.run(Batch((step.run(span, table, (read, write), windows),)))[-1]
            read = write
        return logits.values.copy()
    finally:
        for page in own:
            pages.release(page)
        for page in own_windows:
            assert pool is not None
            pool.release(page)
        for slot in slots:
            assert states is not None
            states.release(slot)


@contextmanager
def left_as_found(engine: CpuEngine) -> Iterator[World]:
    """A world that gives everything back."""
    engine.pools.forget()
    world = World(engine)
    try:
        yield world
    finally:
        for line in world.lines:
            line.close()
    engine.pools.forget()
    assert engine.pools.pages.free == engine.pools.pages.count
    assert engine.pools.states is None or engine.pools.states.free == engine.pools.states.count
    windows = engine.pools.windows
    assert windows is None or windows.pool.free == windows.pool.count


SIZES = st.sampled_from([1, 1, 2, 15, 40, 63, 64, 65, 130])
ACTS = st.one_of(
    st.tuples(st.just("feed"), st.integers(0, 2), SIZES),
    st.tuples(st.just("feed"), st.integers(0, 2), SIZES),
    st.tuples(st.just("together"), st.integers(0, 2), st.integers(0, 79)),
    st.tuples(st.sampled_from(["defer", "fail"]), st.integers(0, 2), SIZES),
    st.tuples(st.sampled_from(["truncate", "adopt"]), st.integers(0, 2), st.integers(0, CONTEXT)),
    st.tuples(st.just("draft"), st.integers(0, 2), st.integers(0, 40)),
    st.tuples(st.sampled_from(["open", "fork", "keep", "close"]), st.just(0), st.just(0)),
)
SCHEDULES = st.lists(st.tuples(st.integers(0, LINES), ACTS), min_size=3, max_size=25)


def check(engine: CpuEngine, schedule) -> None:
    with left_as_found(engine) as world:
        for at, (what, a, b) in schedule:
            with suppress(PoolFull):
                world.act(at, what, a, b)
        parts = []
        for line in world.lines:
            line.truncate(CONTEXT - 1)
            with suppress(PoolFull):
                run = world.extended(line, PROBE)
                parts.append((line, run, [*world.steps(line), world.step(line, run)]))
        found = world.computed(*((line, run) for line, run, _ in parts)) if parts else []
        for line in world.lines:
            line.close()
        ends = [(steps, logits) for (_, _, steps), logits in zip(parts, found, strict=True)]
        for steps, logits in (*world.drafted[-MOST_CHECKED:], *ends):
            np.testing.assert_array_equal(logits, never_left(engine, steps))


@settings(max_examples=15, deadline=None)
@given(SCHEDULES)
def test_what_is_shared_is_what_was_never_left(engine: CpuEngine, schedule) -> None:
    check(engine, schedule)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(SCHEDULES)
def test_what_is_shared_is_what_was_never_left_in_many_schedules(engine, schedule) -> None:
    check(engine, schedule)


def test_a_page_that_somebody_reads_is_not_written(engine: CpuEngine) -> None:
    """Both forks of a page that is not full, and the sequence they came from, go on differently."""
    with left_as_found(engine) as world:
        first = world.lines[0]
        world.feed(first, TEXTS[0][:100])
        world.lines += [first.fork(), first.fork()]
        before = engine.pools.pages.held
        for line, text in zip(world.lines, TEXTS, strict=True):
            world.feed(line, text[100:110])
        assert engine.pools.pages.held == before + 2
        for line in world.lines:
            steps = [*world.steps(line), Step(110, (int(PROBE[0]),), 0)]
            found = world.feed(line, PROBE)
            line.close()
            np.testing.assert_array_equal(found, never_left(engine, steps))


def test_a_chat_that_comes_again_is_not_computed_again(engine: CpuEngine) -> None:
    with left_as_found(engine) as world:
        session = engine.session()
        logits, reused = advance(session, TEXTS[0][:200].tolist())
        assert reused == 0
        wanted = logits.values.copy()
        session.sequence.close()
        again, reused = advance(engine.session(), TEXTS[0][:200].tolist())
        assert reused == (199 if engine.pools.states is None else 184)
        np.testing.assert_array_equal(again.values, wanted)
        assert world.lines[0].length == 0
