"""Pages and states of a device that are stored: what comes back is what left, bit for bit, for this device only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid import CONTEXT, IDS, Made
from loading import load_engine
from timelines import advance

from ktcli.assembly.kvpages import store_below
from ktcli.engine import Engine
from ktcli.engine.forms import how_to_read
from ktcli.engine.session import Session
from ktcli.store.pagefolder import PageFolder

# Grouped and latent attention, states; the others thoroughly.
FAMILIES = "qwen3-next deepseek-v3 gpt-oss deepseek-v4 deepseek-v3.2".split()
ANSWER = IDS[:28]  # up to the end of a page


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.thorough if i > 1 else ())
        for i, name in enumerate(FAMILIES)
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))


def answered(engine: Engine) -> Session:
    """A conversation that has computed a prompt and an answer to it."""
    session = engine.session()
    assert advance(session, IDS)[1] == 0
    for id in ANSWER:
        session.feed([id], defer=1)
    return session


@pytest.mark.thorough
def test_another_process_goes_on_from_what_was_stored(model: Made, tmp_path: Path) -> None:
    """With experts elsewhere, at other pages; the bits are those of the same places only."""
    never_left = answered(model.engine(model.placed("some")))
    record = never_left.sequence.depths
    wanted = never_left.feed([9]).values.copy()
    folder, before = PageFolder(tmp_path / "kv"), [*IDS, *ANSWER]
    first = model.engine(model.placed("some"))
    with store_below(first, folder, 1 << 40, "m"):
        answered(first).sequence.close()
    for mask, eps in (("some", 0), ("all", 1e-4)):
        again = model.engine(model.placed(mask, streams=2))
        again.pools.pages.take(3)
        with store_below(again, folder, 1 << 40, "m") as store:
            session, latent = again.session(), again.pools.latent
            how = how_to_read(record, len(before) + 1, latent=latent)
            assert session.sequence.adopt([*before, 9], how) == len(before)
            found = session.feed([9]).values
            tier = again.pools.tier
            assert tier is not None and tier.restored["disk"] == len(before)
            assert store.counts.damaged == 0
        assert np.abs(found - wanted).max() <= eps * wanted.std()


def test_nobody_else_reads_the_pages_of_a_device(model: Made, tmp_path: Path) -> None:
    """Nor does a device read those of a CPU, or those of weights read otherwise."""
    folder = PageFolder(tmp_path / "kv")
    engines = (
        model.engine(model.placed("some")),
        load_engine(model.path, context=CONTEXT, threads=1),
        load_engine(model.path, context=CONTEXT, threads=1, exact=True),
        model.engine(model.placed("some"), exact=False),
    )
    for engine in engines:
        with store_below(engine, folder, 1 << 40, "m") as store:
            answered(engine)
            assert store.flush()


def test_a_page_of_an_fp8_cache_is_stored_with_its_scales(model: Made) -> None:
    if model.model.spec.chooses:
        pytest.skip("it cannot have an fp8 cache")
    engine = model.engine(model.placed("some", cache="fp8"), exact=False)
    answered(engine)
    memory, spec = engine.memory, model.model.spec
    elements = spec.position_elements - (spec.window_elements if engine.pools.windows else 0)
    heads = spec.position_heads - (spec.window_heads if engine.pools.windows else 0)
    assert memory.page_bytes == 64 * (elements + heads)
    for number in range(engine.pools.pages.count):
        before = memory.saved_page(number)
        memory.restore_page(number, np.full_like(before, 7))
        assert (memory.saved_page(number) == 7).all()
        memory.restore_page(number, before)
        assert (memory.saved_page(number) == before).all()


def test_a_page_is_saved_and_restored_whole(model: Made) -> None:
    engine = model.engine(model.placed("all"))
    memory, pools = engine.memory, engine.pools
    cache = engine._cache
    draw = np.random.default_rng(1)
    windows, spec = pools.windows, model.model.spec
    whole = spec.position_elements - (spec.window_elements if windows else 0)
    assert memory.page_bytes == 64 * 4 * whole
    assert memory.state_bytes == 4 * spec.sequence_elements
    kinds = [
        (memory.saved_page, memory.page_room, memory.restore_page, pools.pages.count),
        (memory.saved_state, memory.state_room, memory.restore_state, cache.scratch_slot),
    ]
    if windows is not None and (of := windows.memory) is not None:
        assert of.page_bytes == 64 * 4 * spec.window_elements
        kinds.append((of.saved_page, of.page_room, of.restore_page, windows.pool.count))
    for save, room, restore, count in kinds:
        given = []
        for number in range(count):
            given.append(room(number))
            given[-1][:] = draw.integers(0, 200, given[-1].size)
            restore(number, given[-1])
        for number, wanted in enumerate(given):
            np.testing.assert_array_equal(save(number), wanted)
    if cache.layers[0].numel() and 0 not in cache.windowed:  # where attention looks for it
        page = cache.layers[0].view(torch.uint8)
        assert page[:64].tolist() == memory.saved_page(0)[:64].tolist()
