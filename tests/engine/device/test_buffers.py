"""Nobody reads a buffer that a stream may already overwrite: experts beside a stream that is late at random.

The stream is a thread that does its work some time after it was given, as a GPU does. As soon as the rule of
`engine/device/experts.py` says that nobody reads a buffer any more, it is filled with rubbish.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import ExpertShape, HostExperts, LayerWeights
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.stream import HostStream
from ktcli.errors import KtError
from ktcli.native import Arena, Format, Pool, Weight, packed_bytes
from ktcli.planner.simulate import CPU, Layer, simulate

LAYERS, EXPERTS, TOP_K, WIDTH = 6, 8, 4, 16
F32 = Format("f32", 32)


class LateStream(HostStream):
    """A thread that gets to its work late, by up to 0.3 ms."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._delays = random.Random(seed)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def copy(self, target: Tensor, source: Tensor) -> None:
        # Its own `copy` looks at the shapes: now, as a GPU's does.
        HostStream().copy(torch.empty_like(target), torch.empty_like(source))
        self.later(lambda: target.copy_(source))

    def call(self, function: int, argument: int) -> None:
        self.later(lambda: super(LateStream, self).call(function, argument))

    def write_flag(self, address: int) -> None:
        self.later(lambda: super(LateStream, self).write_flag(address))

    def await_flag(self, address: int) -> None:
        self.later(lambda: super(LateStream, self).await_flag(address))

    def synchronize(self) -> None:
        done = threading.Event()
        self.later(done.set)
        done.wait()

    def sleep(self) -> None:
        self.synchronize()

    def later(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._delays.random() < 0.3:
                time.sleep(self._delays.random() * 3e-4)
            work()


@dataclass(frozen=True)
class Given:
    """What the device leaves for a layer."""

    x: Tensor
    ids: Tensor
    gate: Tensor


def given(seed: int, n_tokens: int, hidden: int) -> list[Given]:
    rng = np.random.default_rng(seed)

    def one() -> Given:
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n_tokens)])
        x = rng.standard_normal((n_tokens, hidden), np.float32)
        gate = rng.random((n_tokens, TOP_K), np.float32)
        return Given(*(torch.from_numpy(each) for each in (x, ids.astype(np.int32), gate)))

    return [one() for _ in range(LAYERS)]


def matrices(pool: Pool, n: int, k: int, seed: int) -> Weight:
    arena = Arena(packed_bytes(F32, n, k) * EXPERTS)
    weight = Weight(F32, n, k, EXPERTS, arena.address, arena)
    pool.fill_random(weight, seed)
    return weight


def host_experts(stream: HostStream, hidden: int, handoff: Handoff) -> HostExperts:
    """Layer 3's experts are all on the device, and some of the others."""
    pool = Pool(2, spin_us=10)
    pairs = [
        LayerWeights([matrices(pool, 2 * WIDTH, hidden, i)], [matrices(pool, hidden, WIDTH, i)])
        for i in range(LAYERS)
    ]
    layers = [None if i == 3 else pair for i, pair in enumerate(pairs)]
    elsewhere = np.zeros((LAYERS, EXPERTS), np.uint8)
    elsewhere[:, 1] = 1
    shape = ExpertShape(hidden, EXPERTS, TOP_K, 3)
    return HostExperts(
        pool,
        layers,
        shape,
        elsewhere,
        [stream] * len(layers),
        deferral=True,
        handoff=handoff,
        exact=True,
    )


class Rubbish:
    """Spoils the buffers of layers that nobody may read any more."""

    def __init__(self, host: HostExperts) -> None:
        self._host = host

    def after_wait(self, i: int) -> None:
        """The i-th layer was waited for: the one before is done, with what it deferred."""
        if i:
            self._host._inputs[(i - 1) % 2].fill_(float("nan"))
            self._host._gate[i - 1].fill_(float("nan"))
            self._host._ids[i - 1].fill_(-(1 << 30))

    def after_copy(self) -> None:
        self._host._out[0].fill_(float("nan"))


def run_step(
    host: HostExperts, stream: HostStream, inputs: Sequence[Given], defer: int, rubbish: bool
) -> list[NDArray[np.float32]]:
    """Results [T, hidden] of the layers that are here."""
    found, spoil, i = [], Rubbish(host), 0
    later = stream.later if isinstance(stream, LateStream) else lambda work: work()
    host.begin(len(inputs[0].x), np.full(len(inputs[0].x), defer, np.int32))
    for layer, each in enumerate(inputs):
        if not host.has(layer):
            continue
        host.enter(layer, each.x, each.ids, each.gate)
        if rubbish:
            copy, stream.copy = stream.copy, _after(later, spoil, i, stream.copy)
        found.append(host.leave(layer, len(each.x)))
        if rubbish:
            stream.copy = copy
            later(spoil.after_copy)
        i += 1
    stream.synchronize()
    host.check()
    return [each.numpy().copy() for each in found]


def _after(
    later: Callable[[Callable[[], Any]], None], spoil: Rubbish, i: int, copy: Any
) -> Callable[[Tensor, Tensor], None]:
    """A copy of the result that comes after the wait, and rubbish in between."""

    def spoiled(target: Tensor, source: Tensor) -> None:
        later(lambda: spoil.after_wait(i))
        copy(target, source)

    return spoiled


@pytest.fixture
def late() -> Iterator[LateStream]:
    stream = LateStream(5)
    yield stream
    stream.close()


@pytest.mark.parametrize("handoff", Handoff)
def test_no_buffer_is_read_when_it_may_be_overwritten(late: LateStream, handoff: Handoff) -> None:
    host = host_experts(late, 64, handoff)
    prompt = HostStream()
    wanted = host_experts(prompt, 64, Handoff.CALLS)
    for step in range(40):
        inputs, defer = given(step, 1 + step % 3, 64), (0, 2, 1)[step // 3 % 3]
        found = run_step(host, late, inputs, defer, rubbish=True)
        plain = run_step(wanted, prompt, inputs, defer, rubbish=False)
        for a, b in zip(found, plain, strict=True):
            np.testing.assert_array_equal(a, b)
        check_spans(host, defer)


def check_spans(host: HostExperts, defer: int) -> None:
    """Parts ran one after the other, in the order in which the simulated step has them."""
    spans = host.spans()
    ns = [at for span in spans for at in (span.start_ns, span.end_ns)]
    assert ns == sorted(ns)
    # The layer before one that is not here has nobody to hand on to, as the last one.
    groups = ([Layer(1, 1, hits=3, expert_s=1)] * 3, [Layer(1, 1, hits=3, expert_s=1)] * 2)
    order = []
    for first, layers in zip((0, 3), groups, strict=True):
        simulated = simulate(layers, depth=defer).spans
        order += [(first + s.layer, s.what == "deferred") for s in simulated if s.where == CPU]
    assert [(span.layer, span.deferred) for span in spans] == order


@pytest.mark.parametrize("hidden", [1024, 40], ids=["rows apart", "rows padded"])
def test_rows_between_which_the_program_leaves_gaps(late: LateStream, hidden: int) -> None:
    """A width of 1024 k is where rows would meet in the cache: they lie apart, and still are copied whole."""
    host, n_tokens = host_experts(late, hidden, Handoff.CALLS), 3
    inputs = given(1, n_tokens, hidden)
    together = run_step(host, late, inputs, 0, rubbish=True)
    for t in range(n_tokens):
        alone = [Given(g.x[t : t + 1], g.ids[t : t + 1], g.gate[t : t + 1]) for g in inputs]
        for a, b in zip(run_step(host, late, alone, 0, rubbish=True), together, strict=True):
            assert a.shape == (1, hidden)
            np.testing.assert_allclose(a[0], b[t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("handoff", Handoff)
def test_an_id_that_does_not_exist_fails_its_step_and_no_other(
    late: LateStream, handoff: Handoff
) -> None:
    host, inputs = host_experts(late, 64, handoff), given(2, 2, 64)
    before = run_step(host, late, inputs, 1, rubbish=True)
    broken = list(inputs)
    broken[2] = Given(inputs[2].x, torch.full_like(inputs[2].ids, EXPERTS), inputs[2].gate)
    with pytest.raises(KtError, match=r"expert 8, outside -1\.\.7"):
        run_step(host, late, broken, 1, rubbish=False)
    for a, b in zip(run_step(host, late, inputs, 1, rubbish=True), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("handoff", Handoff)
def test_pinned_memory_is_let_go_before_it_goes(handoff: Handoff) -> None:
    stream, pinned = HostStream(), []
    stream.pin = lambda address, size_bytes: pinned.append(address)
    stream.unpin = pinned.remove
    host = host_experts(stream, 64, handoff)
    assert pinned
    del host
    assert not pinned
