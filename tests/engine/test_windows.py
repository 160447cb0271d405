"""Laws of layers with a window: their cache has the bytes that windows need, whatever the context, and no bit of what
is computed depends on where their positions lie."""

from __future__ import annotations

import numpy as np
import pytest
from assembly.stand_ins import StandInPool
from hybrid import Made
from loading import load_engine
from shapes import shape
from timelines import advance, logits_of

from ktcli.engine import cpu
from ktcli.engine.kvcache import KvCache
from ktcli.engine.pagetable import pages_for
from ktcli.engine.prefix import seed
from ktcli.engine.sequence import Sequence
from ktcli.native import PAGE_TOKENS, Batch
from ktcli.ops.state import SNAPSHOTS, LayerState
from ktcli.planner import memory
from ktcli.planner.memory import PREFILL_CHUNK, Use
from ktcli.planner.spec import kv_bytes_per_token

LONG, CONTEXT = 32_768, 512
SHAPES = [
    ("gpt-oss-20b", {}, 12, 128),
    ("mimo-v2-flash", {}, 39, 129),
    ("mixtral-8x7b", {"sliding_window": 4096}, 32, 4096),
]
TEXT = np.random.default_rng(3).integers(0, 99, CONTEXT - 10).astype(np.int32)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("name", "changes", "layers", "window"), SHAPES)
def test_windows_take_the_bytes_that_they_need(name, changes, layers, window, streams) -> None:
    spec, use = shape(name, **changes).spec, Use(streams=streams)
    windowed = [state for state in spec.states if state.window]
    assert len(windowed) == layers and {state.window for state in windowed} == {window}
    # Drafts can be taken back; a window may begin and end within a page; one page is copied before it is written.
    each = pages_for(window + 8) + 2
    pages = streams * each + PREFILL_CHUNK // PAGE_TOKENS + SNAPSHOTS * pages_for(window)
    page_bytes = [2 * PAGE_TOKENS * state.position_elements for state in spec.states]
    of_window = sum(
        size for size, state in zip(page_bytes, spec.states, strict=True) if state.window
    )
    whole = streams * LONG // PAGE_TOKENS * (sum(page_bytes) - of_window)
    need = whole + pages * of_window
    assert use.cache_bytes(spec, LONG) == need < 0.8 * streams * LONG * kv_bytes_per_token(spec)
    # So much is reserved, and a conversation touches no more of it.
    team = StandInPool(1)
    cache = KvCache(spec, use, LONG, team, seed({}))  # type: ignore[arg-type]
    assert team.asked_bytes() == need + cache.state_memory.size_bytes
    windows = cache.pools.windows
    assert windows is not None and windows.pool.count == pages
    sequence = Sequence(cache.pools)
    for first in range(0, LONG - 600, PREFILL_CHUNK):
        sequence.commit(sequence.extend(np.full(PREFILL_CHUNK, first % 97, np.int32)))
    for token in range(500):
        sequence.commit(sequence.extend(np.array([token], np.int32)))
        assert len(sequence.window_pages) <= each
    assert windows.pool.counts.most_held <= each + PREFILL_CHUNK // PAGE_TOKENS
    sequence.close()
    cache.pools.forget()
    assert windows.pool.free == windows.pool.count


def test_without_windows_nothing_changes() -> None:
    spec = shape("qwen3-30b-a3b").spec
    assert Use().cache_bytes(spec, LONG) == LONG * kv_bytes_per_token(spec)
    assert KvCache(spec, Use(), LONG, StandInPool(1), seed({})).pools.windows is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mimo-v2-flash", "mistral")),
    ],
)
def test_no_bit_depends_on_where_positions_lie(name, tmp_path, monkeypatch) -> None:
    made = Made.convert(name, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LayerState, "windowed", False)
        before = load_engine(made.path, context=CONTEXT, threads=2)
    for module in (memory, cpu):  # so that the windows' pages are fewer than the context's
        monkeypatch.setattr(module, "PREFILL_CHUNK", PAGE_TOKENS)
    monkeypatch.setattr(memory, "_WINDOWS_KEPT", 1)
    engine = load_engine(made.path, context=CONTEXT, threads=2)
    assert before.pools.windows is None
    windows = engine.pools.windows
    assert windows is not None and windows.pool.count < pages_for(TEXT.size)
    wanted = logits_of(before.session(), TEXT.tolist())
    session = engine.session()

    def goes_on(upto: int, size: int) -> None:
        while session.length < upto:
            at = session.length
            logits = session.feed(TEXT[at : at + size].tolist())
            np.testing.assert_array_equal(logits.values, wanted[session.length - 1])

    for upto, size in ((30, 1), (95, 13), (350, 109), (440, 1)):
        goes_on(upto, size)
    session.rewind(100)  # its window is gone: computed again
    goes_on(160, 6)
    drafted = np.array([*TEXT[160:163], 5, 6, 7], np.int32)  # three are right
    run = session.sequence.extend(drafted, first_output=0, chunk=(160, 1))
    rows = engine.run(Batch((run,)))
    for i in range(3):
        np.testing.assert_array_equal(rows[i].values, wanted[160 + i])
    session.sequence.commit(run, 1, prompt=False)
    session.sequence.commit(run._replace(ids=drafted[1:], start=161), 2, prompt=False)
    goes_on(300, 1)
    fork = session.sequence.fork()
    goes_on(420, 60)
    session.sequence.close()
    session.sequence = fork
    assert session.length == 300
    goes_on(480, 45)
    session.sequence.close()
    engine.pools.forget()
    first, again = engine.session(), engine.session()
    advance(first, TEXT[:480].tolist())
    first.sequence.close()
    logits, reused = advance(again, TEXT.tolist())
    np.testing.assert_array_equal(logits.values, wanted[-1])
    assert reused == 480
    again.sequence.close()
    engine.pools.forget()
    assert windows.pool.free == windows.pool.count
