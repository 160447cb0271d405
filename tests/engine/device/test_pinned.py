"""Weights of experts that are pinned where they lie, beside the work of others."""

from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import pytest
from hybrid import IDS, Made

from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.pinnedweights import PinnedWeights
from ktcli.engine.device.slabs import Slab, spans_of
from ktcli.engine.device.stream import HostStream
from ktcli.errors import DeviceError

PAGE = mmap.PAGESIZE
PATIENCE_S = 30


class Recorded(HostStream):
    """A stream that notes what is pinned, up to `most` blocks."""

    def __init__(self, most: int = 1 << 30) -> None:
        super().__init__()
        self.most, self.spans = most, dict[int, int]()

    def pin(self, address: int, size_bytes: int) -> None:
        if len(self.spans) == self.most:
            raise DeviceError("cudaHostRegister failed with CUDA error 2")
        self.spans[address] = address + size_bytes

    def unpin(self, address: int) -> None:
        del self.spans[address]


def pinned(
    memory: np.ndarray, spans: list[tuple[int, int]], stream: HostStream
) -> tuple[PinnedWeights, int]:
    """The pinned spans of some memory, counted from its first page, and the address of this."""
    base = -(-memory.ctypes.data // PAGE) * PAGE
    found = PinnedWeights(
        [(base + first, base + last) for first, last in spans], memory, [stream], 4 * PAGE
    )
    found.begin()
    assert found.finished.wait(PATIENCE_S)
    return found, base


def test_whole_pages_are_pinned_once_and_nothing_else() -> None:
    memory, stream = np.arange(40 * PAGE, dtype=np.uint8), Recorded()
    # The second begins on the page where the first ends; the last is longer than a block.
    given = [(20 * PAGE, 30 * PAGE - 1), (PAGE + 5, 2 * PAGE + 7), (2 * PAGE + 9, 3 * PAGE)]
    _weights, base = pinned(memory, given, stream)
    pages = [
        page
        for a, b in stream.spans.items()
        for page in range((a - base) // PAGE, (b - base) // PAGE)
    ]
    assert sorted(pages) == [1, 2, *range(20, 30)]
    assert max(b - a for a, b in stream.spans.items()) == 4 * PAGE


def test_bytes_are_given_in_pieces_that_were_pinned_at_once() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 40 * PAGE, dtype=np.uint8)
    weights, base = pinned(memory, [(0, 10 * PAGE), (20 * PAGE, 24 * PAGE)], Recorded())
    found = weights.sources(base + 3 * PAGE, 3 * PAGE)
    assert found is not None and [each.nbytes for each in found] == [PAGE, 2 * PAGE]
    first = base - memory.ctypes.data + 3 * PAGE
    np.testing.assert_array_equal(
        np.concatenate([each.numpy() for each in found]), memory[first : first + 3 * PAGE]
    )
    for first, last in ((9, 11), (15, 16), (19, 21), (23, 25), (30, 31)):
        assert weights.sources(base + first * PAGE, (last - first) * PAGE) is None


def test_what_cannot_be_pinned_is_not_given() -> None:
    """What was set aside is free again, for those who pin later."""
    stream = Recorded(most=3)
    weights, base = pinned(np.zeros(40 * PAGE, np.uint8), [(0, 16 * PAGE)], stream)
    assert len(stream.spans) == 2
    assert weights.size_bytes == 8 * PAGE and weights.sources(base, 8 * PAGE) is not None
    assert weights.sources(base + 7 * PAGE, 2 * PAGE) is None


def test_everything_is_unpinned_before_the_memory_is_freed() -> None:
    stream, memory = Recorded(), np.zeros(40 * PAGE, np.uint8)
    weights, _base = pinned(memory, [(0, 16 * PAGE)], stream)
    assert len(stream.spans) == 4
    del weights
    assert not stream.spans


def test_a_thread_in_the_middle_is_stopped_first() -> None:
    goes_on, begun = threading.Event(), threading.Event()

    class Slow(Recorded):
        def pin(self, address: int, size_bytes: int) -> None:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            super().pin(address, size_bytes)

    stream = Slow()
    weights = PinnedWeights([(0, 64 * PAGE)], None, [stream], PAGE)
    weights.begin()
    assert begun.wait(PATIENCE_S)
    threading.Timer(0.05, goes_on.set).start()
    del weights
    assert not stream.spans


def test_absent_experts_are_not_pinned(made: Made) -> None:
    engine = made.engine(made.placed("some"))
    for layer, weights in enumerate(engine._layers):
        assert weights is not None
        here = np.flatnonzero(~engine.placement.mask[layer])
        spans = list(spans_of(weights, ~engine.placement.mask[layer]))
        sizes = [size for _, _, size in Slab(layer, weights, (int(here[0]),)).pieces()]
        assert sum(last - first for first, last in spans) == sum(sizes) * len(here)
        for weight in (*weights.gate_up, *weights.down):
            at = [
                weight.address + int(expert) * (sizes[0] if weight in weights.gate_up else sizes[1])
                for expert in np.flatnonzero(engine.placement.mask[layer])
            ]
            assert not any(first <= each < last for each in at for first, last in spans)


@pytest.mark.parametrize("slab_bytes", [1, 1 << 14, 1 << 24])
def test_pinned_weights_are_copied_from_where_they_lie(
    made: Made, monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    """The first prompt may gather; the second does not, and gives the same bits."""
    placed = made.placed("some", long_prompts=LongPrompts(0, 40), slab_bytes=slab_bytes)
    engine = made.engine(placed)
    first = engine.session().feed(IDS).values.copy()
    assert engine.pinned.finished.wait(PATIENCE_S)
    monkeypatch.setattr(Slab, "gather", lambda *_: pytest.fail("a slab was gathered"))
    np.testing.assert_array_equal(engine.session().feed(IDS).values, first)


def test_weights_that_cannot_be_pinned_are_gathered(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = made.placed("some", long_prompts=LongPrompts(0, 40), slab_bytes=1 << 14)
    wanted = made.engine(placed).session().feed(IDS).values.copy()

    def refused(*_: object) -> None:
        raise DeviceError("cudaHostRegister failed with CUDA error 2")

    engine = made.engine(placed)
    monkeypatch.setattr(type(engine.segments[0].copies), "pin", refused)
    np.testing.assert_array_equal(engine.session().feed(IDS).values, wanted)
    assert engine.pinned.finished.wait(PATIENCE_S) and not engine.pinned.size_bytes
    np.testing.assert_array_equal(engine.session().feed(IDS).values, wanted)


def test_an_engine_that_goes_unpins(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    placed = made.placed("some", long_prompts=LongPrompts(0, 40), slab_bytes=1 << 14)
    engine = made.engine(placed)
    stream = type(engine.segments[0].copies)
    monkeypatch.setattr(stream, "pin", lambda self, address, size: held.append(address))
    monkeypatch.setattr(
        stream, "unpin", lambda self, address: address in held and held.remove(address)
    )
    engine.session().feed(IDS)
    assert engine.pinned.finished.wait(PATIENCE_S) and held
    del engine
    gc.collect()
    assert not held
