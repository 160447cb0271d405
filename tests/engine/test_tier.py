"""Laws of pages and states that leave memory: what comes back equals what never left, bit for bit, and is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hybrid import Made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import load_engine
from numpy.typing import NDArray
from reference import ONE_OF_EACH

from ktcli.assembly.kvpages import store_below, stored_pages
from ktcli.engine import CpuEngine
from ktcli.engine.forms import how_to_read
from ktcli.engine.pagetable import pages_for
from ktcli.engine.restoring import ReadingWorth
from ktcli.engine.sequence import Sequence
from ktcli.engine.tier import Tier
from ktcli.native import Batch
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore
from ktcli.store.readrate import ReadRate

CONTEXT = 320
Ids = NDArray[np.int32]
# Grouped and latent attention, windows, states, pooled windows, chosen positions and blocks.
FAMILIES = "qwen3 deepseek-v3 gpt-oss qwen3-next deepseek-v4".split()
MORE = "deepseek-v3.2 glm-5.3 minimax-m3 mimo-v2-flash ling-3 mistral laguna".split()
OTHERS = sorted({case.name for case in ONE_OF_EACH} - {*FAMILIES, *MORE})
TEXT = np.random.default_rng(7).integers(0, 99, CONTEXT).astype(np.int32)
OTHER = np.random.default_rng(8).integers(0, 99, CONTEXT).astype(np.int32)
STEPS = st.lists(st.sampled_from([1, 1, 2, 16, 63, 64, 65, 100]), min_size=1, max_size=8)


pytestmark = pytest.mark.in_turn("engine")


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    made = Made.convert(request.param, tmp_path_factory.mktemp(request.param))
    return load_engine(made.path, context=CONTEXT, threads=1)


@pytest.fixture(autouse=True)
def reading_pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is read, however fast ten tokens are computed again."""
    if not any(word in request.node.name for word in ("pays", "slower")):
        monkeypatch.setattr(ReadingWorth, "pays", lambda *_: True)


def feed(engine: CpuEngine, sequence: Sequence, ids: Ids) -> NDArray[np.float32]:
    """The logits after ids, in steps of one form each, as in a session."""
    while True:
        run = sequence.extend(ids[: sequence.until_mark(ids.size)])
        logits = engine.run(Batch((run,)))[-1].values.copy()
        sequence.commit(run)
        ids = ids[run.ids.size :]
        if not ids.size:
            return logits


def told(
    engine: CpuEngine, text: Ids, steps: list[int], *, one_prompt: bool = False
) -> tuple[int, bytes]:
    """Computes a text in steps by a sequence that ends; returns its length, and how each id was computed.

    Args:
        one_prompt: whether the steps are parts of a prompt; otherwise each is a prompt behind the others.
    """
    sequence, at = engine.sequence(), 0
    if one_prompt:
        sequence.plan(sum(steps))
    for size in steps:
        ids = text[at : min(at + size, text.size - 2)]
        if ids.size:
            if not one_prompt:
                sequence.plan(ids.size)
            feed(engine, sequence, ids)
        at += ids.size
    how = sequence.depths
    sequence.close()
    return at, how


def resumed(
    engine: CpuEngine, ids: Ids, record: bytes = b""
) -> tuple[int, list[bytes], NDArray[np.float32]]:
    """Goes on with ids, of which the first were computed as a record says: the number reused, the pages that hold
    them, and the logits after the last."""
    sequence = engine.sequence()
    n = sequence.adopt(ids, how_to_read(record, ids.size, latent=engine.pools.latent))
    assert engine.memory is not None
    pages = [engine.memory.saved_page(page).tobytes() for page in sequence.pages]
    if (windows := engine.pools.windows) is not None and n:
        assert windows.memory is not None
        pages += [windows.memory.saved_page(page).tobytes() for page in sequence.window_pages]
    logits = feed(engine, sequence, ids[n:])
    sequence.close()
    return n, pages, logits


def leave(engine: CpuEngine) -> None:
    """Forgets everything, as if the process had ended."""
    engine.pools.forget()
    cache = engine.memory
    assert engine.pools.pages.held == 0
    for page in range(engine.pools.pages.count):
        cache.saved_page(page)[:] = 0xAA
    if (windows := engine.pools.windows) is not None:
        assert windows.pool.held == 0 and windows.memory is not None
        for page in range(windows.pool.count):
            windows.memory.saved_page(page)[:] = 0xAA
    if engine.pools.states is not None:
        for slot in range(engine.pools.states.count):
            cache.saved_state(slot)[:] = 0xAA


def check(engine: CpuEngine, steps: list[int], folder: PageFolder) -> None:
    leave(engine)
    with store_below(engine, folder, 1 << 40, "m") as store:
        n, how = told(engine, TEXT, steps)
        never_left = resumed(engine, TEXT[: n + 1], how)
    assert engine.pools.tier is None
    leave(engine)
    with store_below(engine, folder, 1 << 40, "m") as store:
        back = resumed(engine, TEXT[: n + 1], how)
        written = store.counts.written
    assert back[0] == never_left[0] == n
    assert back[1] == never_left[1]
    assert back[2].tobytes() == never_left[2].tobytes()
    assert store.counts.damaged == 0 and (store.counts.read > 0) == (back[0] > 0)
    if engine.pools.states is None:
        windows, pages = engine.pools.windows, pages_for(n)
        of_window = 0 if windows is None else pages - windows.first(n)
        stored = (
            pages if engine.memory.page_bytes else 0
        )  # every layer has a window: nothing else is stored
        assert written == 0 and store.counts.read == stored + of_window


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_what_comes_back_equals_what_never_left(
    engine: CpuEngine, tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    check(engine, steps, PageFolder(tmp_path_factory.mktemp("kv") / "kv"))


@pytest.mark.thorough
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_what_comes_back_equals_what_never_left_however_it_was_computed(
    engine: CpuEngine, tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    check(engine, steps, PageFolder(tmp_path_factory.mktemp("kv") / "kv"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_what_comes_back_equals_what_never_left_in_every_other_family(
    tmp_path: Path, name: str
) -> None:
    made = Made.convert(name, tmp_path)
    engine = load_engine(made.path, context=CONTEXT, threads=1)
    for i, steps in enumerate(([100, 1, 65, 2], [64, 1, 1, 150])):
        check(engine, steps, PageFolder(tmp_path / f"kv-{i}"))


def test_what_is_evicted_before_it_was_written_is_written_and_comes_back(
    engine: CpuEngine, tmp_path: Path
) -> None:
    leave(engine)
    with store_below(engine, PageFolder(tmp_path / "kv"), 1 << 40, "m") as store:
        n, how = told(engine, TEXT, [200, 1, 1])
        never_left = resumed(engine, TEXT[: n + 1], how)
        for seed in range(3):
            told(
                engine,
                np.random.default_rng(seed).integers(0, 99, CONTEXT).astype(np.int32),
                [150, 150],
            )
        assert engine.pools.pages.counts.evicted > 0
        store.flush()
        back = resumed(engine, TEXT[: n + 1], how)
    assert back[0] == never_left[0] > 0 and back[1] == never_left[1]
    assert back[2].tobytes() == never_left[2].tobytes()


def test_a_conversation_that_begins_alike_uses_what_is_alike_only(
    engine: CpuEngine, tmp_path: Path
) -> None:
    leave(engine)
    alike = np.concatenate([TEXT[:150], OTHER[150:]])
    alone = resumed(engine, alike[:250])[2] if engine.pools.states is None else None
    leave(engine)
    with store_below(engine, PageFolder(tmp_path / "kv"), 1 << 40, "m"):
        told(engine, TEXT, [128, 100], one_prompt=True)
    with store_below(engine, PageFolder(tmp_path / "kv"), 1 << 40, "m"):
        leave(engine)
        n, _, logits = resumed(engine, alike[:250])
        assert n == 128
        leave(engine)
        assert resumed(engine, OTHER)[0] == 0
    assert alone is None or np.corrcoef(alone, logits)[0, 1] > 0.99


def test_damage_costs_time_and_nothing_else(engine: CpuEngine, tmp_path: Path) -> None:
    folder = PageFolder(tmp_path / "kv")
    leave(engine)
    with store_below(engine, folder, 1 << 40, "m"):
        n, how = told(engine, TEXT, [250])
    leave(engine)
    alone = resumed(engine, TEXT[: n + 1], how)
    for path in folder.path.glob("*/*.pages"):
        data = bytearray(path.read_bytes())
        for at in (len(data) // 2, len(data) - 64):
            data[at] ^= 1
        path.write_bytes(data)
    leave(engine)
    with store_below(engine, folder, 1 << 40, "m") as store:
        n, _, logits = resumed(engine, TEXT[: n + 1], how)
    assert store.counts.damaged == 1 and n < 250
    if n == 0:
        assert logits.tobytes() == alone[2].tobytes()


def slow() -> ReadRate:
    """A rate of one byte per second, as measured."""
    rate = ReadRate()
    rate.note(1 << 30, float(1 << 30))
    return rate


class Slow:
    """A store that reads more slowly than the engine computes."""

    def __init__(self, store: object) -> None:
        self._store = store
        self.rate = slow()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_a_store_that_is_slower_than_computing_is_not_read(
    engine: CpuEngine, tmp_path: Path
) -> None:
    leave(engine)
    with store_below(engine, PageFolder(tmp_path / "kv"), 1 << 40, "m") as store:
        told(engine, TEXT, [200])
    leave(engine)
    with store_below(engine, PageFolder(tmp_path / "kv"), 1 << 40, "m") as store:
        pools = engine.pools
        tier = Tier([Slow(store)], engine.memory, pools.pages, pools.states, pools.windows)  # type: ignore[list-item]
        pools.tier = tier
        told(engine, OTHER, [200])  # whose speed is measured
        before = store.counts.read
        assert resumed(engine, TEXT[:250])[0] == 0 and store.counts.read == before
        assert tier.restored == {"disk": 0}


def test_the_next_process_knows_at_once_whether_reading_pays(
    engine: CpuEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    pack = tmp_path / "pack"
    leave(engine)
    with stored_pages(engine, pack, 1 << 40):
        told(engine, TEXT, [200])
    leave(engine)
    with stored_pages(engine, pack, 1 << 40) as store:
        assert isinstance(store, PageStore)
        store.rate = slow()
        assert resumed(engine, TEXT[:250])[0] == 0 and store.counts.read == 0
    (tmp_path / "cpu.json").write_text("{" * 1000)  # nobody has measured
    leave(engine)
    with stored_pages(engine, pack, 1 << 40) as store:
        assert isinstance(store, PageStore)
        assert resumed(engine, TEXT[:250])[0] > 0 and store.counts.read > 0
