"""Adapters beside the model: no bit depends on threads or on room that nobody uses; no page is shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from engine.made_adapters import ROOM, attach, random_adapter
from loading import load_engine, pack_on
from reference import case_named, write_checkpoint
from timelines import advance, logits_of

from ktcli.engine import CpuEngine
from ktcli.engine.adapters import AttachedAdapter
from ktcli.errors import KtError, UsageError
from ktcli.hardware.numa import Numa
from ktcli.native import Batch, Pool
from ktcli.planner.memory import AdapterRoom, Use

IDS = np.random.default_rng(4).integers(0, 99, 90).tolist()


THOROUGH = [
    pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt-oss", "nemotron-3-nano")
]


@pytest.fixture(scope="module", params=["qwen3", *THOROUGH])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With gate and up, with biases, and without a gate."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = write_checkpoint(case_named(request.param), folder / "checkpoint")
    return convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")


Load = Callable[..., CpuEngine]


@pytest.fixture(scope="module")
def load(pack: Path) -> Load:
    """Loads it with room for adapters."""

    def made(**how: object) -> CpuEngine:
        wanted = {"threads": 2, "adapters": ROOM, "streams": 6, **how}
        return load_engine(pack, context=128, all_logits=True, **wanted)  # type: ignore[arg-type]

    return made


def logits(engine: CpuEngine, adapter: AttachedAdapter | None) -> np.ndarray:
    """Of a prompt, and of some tokens after it one by one."""
    session = engine.session()
    session.sequence.adopt(IDS[:1], adapter=adapter)
    rows = [logits_of(session, IDS[:60])]
    rows += [session.feed([token]).values[None].copy() for token in IDS[60:]]
    return np.concatenate(rows)


def test_room_that_nobody_uses_changes_no_bit(load: Load) -> None:
    engine = load()
    plain = logits(load(adapters=None), None)
    assert np.array_equal(logits(engine, None), plain)
    adapter = attach(engine, 1)
    changed = logits(engine, adapter)
    assert np.abs(changed - plain).max() > 0.1 * plain.std()
    assert np.array_equal(logits(engine, None), plain)
    assert engine.adapters is not None
    engine.adapters.detach(adapter)
    assert np.array_equal(logits(engine, adapter), plain)  # a number without an adapter


def test_threads_change_no_bit(pack: Path) -> None:
    use = Use(all_logits=True, adapters=ROOM)
    engines = [pack_on(Pool(threads, spin_us=0), pack, 128, use) for threads in (1, 2, 3, 5)]
    one, *others = (logits(engine, attach(engine, 1)) for engine in engines)
    assert all(np.array_equal(one, other) for other in others)


def test_nodes_add_up_what_one_computes(load: Load) -> None:
    one, *others = (
        logits(engine, attach(engine, 1))
        for engine in (load(threads=1, numa=Numa(nodes)) for nodes in (1, 2, 3))
    )
    for other in others:
        off = np.abs(other - one).max(axis=1) / one.std()
        assert (off <= 1e-4).mean() >= 0.9, np.sort(off)[-8:]


def test_exact_is_close_to_fast(load: Load) -> None:
    """The updates are no rounding: an engine without them is far off."""
    exact, fast = (load(exact=exact) for exact in (True, False))
    wanted, found = logits(exact, attach(exact, 1)), logits(fast, attach(fast, 1))
    assert np.sqrt(((found - wanted) ** 2).mean()) <= 0.2 * wanted.std()
    assert np.sqrt(((logits(exact, None) - wanted) ** 2).mean()) > 0.3 * wanted.std()


def test_pages_are_found_under_the_same_adapter_only(load: Load) -> None:
    engine = load()
    adapters = [None, attach(engine, 1), attach(engine, 2)]
    for adapter in adapters:
        session = engine.session()
        assert session.sequence.adopt(IDS, adapter=adapter) == 0
        session.feed(IDS)
        del session
    few = engine.pools.states is not None  # snapshots are kept of
    for adapter in adapters[-1:] if few else adapters:
        session = engine.session()
        reused = session.sequence.adopt([*IDS, 1], adapter=adapter)
        assert 60 <= reused <= 90
        del session
    almost = AttachedAdapter(1, "f" + adapters[1].digest[1:])  # type: ignore[union-attr]
    assert engine.session().sequence.adopt([*IDS, 1], adapter=almost) == 0


def test_a_default_adapter_is_of_every_sequence(load: Load) -> None:
    engine = load()
    adapter = attach(engine, 1)
    wanted = logits(engine, adapter)
    engine.pools.adapter = adapter
    assert np.array_equal(logits(engine, None), wanted)
    session = engine.session()
    found, _ = advance(session, IDS)
    assert np.array_equal(found.values, wanted[-1]) or np.allclose(
        found.values, wanted[-1], atol=0.2 * wanted.std()
    )
    fork = session.sequence.fork()
    assert fork.extend(np.array([1], np.int32)).adapter == adapter.number
    fork.close()


def test_what_does_not_fit_is_refused(load: Load) -> None:
    engine = load(adapters=AdapterRoom(1, 16, 1 << 26))
    assert engine.adapters is not None
    made = random_adapter(engine, 1)
    held = engine.adapters.attach(made)
    with pytest.raises(UsageError, match="no room for another adapter: the limit is 1"):
        engine.adapters.attach(random_adapter(engine, 2))
    engine.adapters.detach(held)
    narrow = load(adapters=AdapterRoom(1, 2, 1 << 26))
    assert narrow.adapters is not None
    with pytest.raises(UsageError, match="there is room for only 2"):
        narrow.adapters.attach(made)
    run = engine.sequence().extend(np.array([1], np.int32))._replace(adapter=2)
    with pytest.raises(KtError, match=r"adapter is 2, outside 0\.\.1"):
        engine.run(Batch((run,)))
    plain = load(adapters=None)
    run = plain.sequence().extend(np.array([1], np.int32))._replace(adapter=1)
    with pytest.raises(KtError, match=r"adapter is 1, outside 0\.\.0"):
        plain.run(Batch((run,)))
