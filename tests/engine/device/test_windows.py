"""Laws of layers with a window on a device: their cache has the bytes that windows need, whatever the context, and no
bit of what is computed depends on where their positions lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine.test_windows import LONG, SHAPES
from hybrid import Made
from shapes import shape
from timelines import advance

from ktcli.assembly.kvpages import store_below
from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.pagetable import pages_for
from ktcli.engine.sequence import Sequence
from ktcli.native import PAGE_TOKENS, Batch
from ktcli.ops.state import SNAPSHOTS, LayerState
from ktcli.planner import memory
from ktcli.planner.device import cache_bytes
from ktcli.planner.memory import Use
from ktcli.planner.spec import kv_bytes_per_token
from ktcli.store.pagefolder import PageFolder

CONTEXT, CHUNK = 840, 4096
TEXT = np.random.default_rng(3).integers(0, 99, CONTEXT - 6).astype(np.int32)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("name", "changes", "layers", "window"), SHAPES)
def test_windows_take_the_bytes_that_they_need(name, changes, layers, window, streams) -> None:
    spec, use = shape(name, **changes).spec, Use(streams=streams)
    pages = streams * LONG // PAGE_TOKENS
    # Drafts can be taken back; a window may begin and end within a page; one page is copied before it is written.
    windows = streams * (pages_for(window + 8) + 2) + CHUNK // PAGE_TOKENS
    windows += SNAPSHOTS * pages_for(window)
    assert use.window_pages(spec, LONG, CHUNK) == windows
    cache = DeviceCache(spec, pages, (torch.device("meta"),) * spec.layers, windows=windows)
    assert len(cache.windowed) == layers and cache.windows is not None
    assert (cache.pages.count, cache.windows.count) == (pages, windows)
    each = [2 * PAGE_TOKENS * state.position_elements for state in spec.states]
    of_window = sum(each[i] for i in cache.windowed)
    assert (cache.pages.each_bytes, cache.windows.each_bytes) == (sum(each) - of_window, of_window)
    # One page of each kind belongs to nobody.
    need = pages * (sum(each) - of_window) + windows * of_window + sum(each)
    assert need < 0.8 * streams * LONG * kv_bytes_per_token(spec)
    planned = cache_bytes(spec, LONG, CHUNK, streams)
    assert 0 <= cache.size_bytes - need <= 256 * spec.layers and planned == need


class Two:
    """A conversation on an engine with window pages, and the same, step by step, on one that keeps everything."""

    def __init__(self, engine: DeviceEngine, whole: DeviceEngine) -> None:
        self.engines = engine, whole
        self.sessions = engine.session(), whole.session()

    @property
    def length(self) -> int:
        return self.sessions[0].length

    def goes_on(self, upto: int, size: int) -> None:
        while self.length < upto:
            ids = TEXT[self.length : self.length + size].tolist()
            found, wanted = (session.feed(ids).values.copy() for session in self.sessions)
            np.testing.assert_array_equal(found, wanted)

    def goes_back(self, to: int) -> None:
        first, second = self.sessions
        first.rewind(to)
        second.rewind(first.length)

    def drafts(self, ids: list[int], right: int) -> None:
        """Computes ids together as each alone; the first `right` count."""
        self._step([[session.sequence] for session in self.sessions], ids, right)

    def parts(self, n: int) -> None:
        """Goes on with n forks beside it, in one step, and is the first of them afterwards."""
        lines = [
            [session.sequence, *(session.sequence.fork() for _ in range(n))]
            for session in self.sessions
        ]
        for token in (5, 6):
            self._step(lines, [token], 1)
        for session, (line, first, *others) in zip(self.sessions, lines, strict=True):
            session.sequence = first
            for each in (line, *others):
                each.close()

    def _step(self, lines: list[list[Sequence]], ids: list[int], right: int) -> None:
        """Computes ids of some sequences of each engine."""
        found, tokens = [], np.array(ids, np.int32)
        for engine, some in zip(self.engines, lines, strict=True):
            runs = tuple(
                line.extend(tokens, first_output=0, chunk=(line.length, 1)) for line in some
            )
            found.append([logits.values.copy() for logits in engine.run(Batch(runs))])
            for line, run in zip(some, runs, strict=True):
                line.commit(run, right, prompt=False)
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("gpt-oss", "f32"),
        pytest.param("gpt-oss", "fp8", marks=pytest.mark.thorough),
        *(
            pytest.param(name, "f32", marks=pytest.mark.thorough)
            for name in ("mimo-v2-flash", "mistral")
        ),
    ],
)
def test_no_bit_depends_on_where_positions_lie(
    name: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made.convert(name, tmp_path)
    long = LongPrompts(100, 128, PAGE_TOKENS)  # both ways of prompts
    placed = made.placed("some", context=CONTEXT, long_prompts=long, streams=3, cache=cache)
    with monkeypatch.context() as patched:
        patched.setattr(LayerState, "windowed", False)
        whole = made.engine(placed, exact=cache == "f32")
    monkeypatch.setattr(memory, "PREFILL_CHUNK", PAGE_TOKENS)
    monkeypatch.setattr(memory, "_WINDOWS_KEPT", 0)
    engine, again = (made.engine(placed, exact=cache == "f32") for _ in range(2))
    windows = engine.pools.windows
    assert windows is not None and whole.pools.windows is None
    assert windows.pool.count < pages_for(TEXT.size)
    two, folder = Two(engine, whole), PageFolder(tmp_path / "kv")
    with store_below(engine, folder, 1 << 40, "m"):
        for upto, size in ((5, 1), (95, 13), (350, 109), (390, 1)):
            two.goes_on(upto, size)
        two.goes_back(100)  # its window is gone: computed again
        two.goes_on(160, 20)
        two.drafts([*TEXT[160:163].tolist(), 5, 6, 7], 3)
        two.goes_on(300, 47)
        two.parts(2)  # in a captured step of four, with a row of nobody
        two.goes_back(256)
        two.goes_on(TEXT.size, 145)
        for session in two.sessions:
            session.sequence.close()
    found = []
    for restored in (engine, again):  # shared, and from the store
        with store_below(restored, folder, 1 << 40, "m") as store:
            session = restored.session()
            logits, reused = advance(session, TEXT[:833].tolist())  # full pages and one token
            assert reused == 832 and (store.counts.read > 0) == (restored is again)
            found.append(logits.values.copy())
            session.sequence.close()
    np.testing.assert_array_equal(*found)
    engine.pools.forget()
    assert windows.pool.free == windows.pool.count
