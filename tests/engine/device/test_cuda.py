"""The laws of the engine with a device on a real one: `pytest -m gpu`. Not yet run on a GPU.

The same model, the same reference and the same laws as on the fake device, now with a captured graph, copies
that take their time, and memory that runs out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from cores import TWO
from engine.made_adapters import ROOM, random_adapter, room_beside
from hybrid import ANSWER, CONTEXT, IDS, F32Array, Made, answer, close
from loading import load_engine
from timelines import logits_of
from torch import Tensor

from ktcli.engine import Engine
from ktcli.engine.adapters import AttachedAdapter
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.sequence import Sequence
from ktcli.errors import KtError, OutOfDeviceMemory
from ktcli.measure.policy import Policy
from ktcli.native import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use"
    ),
]
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-3  # of f32 sums in another order, in logits


@pytest.fixture(scope="module")
def there(made: Made) -> Made:
    """The model whose engines have the GPU."""
    return Made(made.path, made.model, made.pack, (GPU,))


@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("mask", ["none", "some", "front", "all"])
def test_logits_are_those_of_the_cpu(
    made: Made, there: Made, mask: str, handoff: Handoff
) -> None:  # fmt: skip
    engine = there.engine(there.placed(mask, handoff=handoff))
    session, wanted = engine.session(), made.cpu_only.session()
    assert close(logits_of(session, IDS), logits_of(wanted, IDS), EPS)
    for token in ANSWER:
        assert close(session.feed([token]).values, wanted.feed([token]).values, EPS)


@pytest.mark.parametrize("handoff", Handoff)
def test_deferral_is_the_formula(made: Made, there: Made, handoff: Handoff) -> None:
    for mask in ("none", "some", "front"):
        engine = there.engine(there.placed(mask, handoff=handoff))
        for depth in (0, 1, 2, 9):
            wanted = made.reference(made.mask(mask), depth)
            assert close(answer(engine, depth), wanted, EPS), (mask, depth)


def test_depth_zero_is_bit_identical(there: Made) -> None:
    engines = [
        there.engine(there.placed("none"), exact=False, policy=policy)
        for policy in (Policy.KT, Policy.ALL_CPU)
    ]
    np.testing.assert_array_equal(*[answer(engine, 0) for engine in engines])


@pytest.mark.parametrize(
    ("threshold", "slab_bytes", "mask"),
    [(0, 1, "some"), (0, 1 << 14, "front"), (30, 1 << 24, "some"), (None, 0, "some")],
)
def test_long_prompts_go_either_way(
    made: Made, there: Made, threshold: int | None, slab_bytes: int, mask: str
) -> None:
    long = LongPrompts(threshold, 40)
    engine = there.engine(there.placed(mask, long_prompts=long, slab_bytes=slab_bytes))
    session, wanted = engine.session(), made.cpu_only.session()
    for turn in (IDS[:50], IDS[50:60], ANSWER[:1], IDS[60:], ANSWER[1:2]):
        assert close(session.feed(turn).values, wanted.feed(turn).values, EPS)


@pytest.mark.parametrize("policy", Policy)
def test_policies_compute_the_same(made: Made, there: Made, policy: Policy) -> None:
    engine = there.engine(there.placed(), policy=policy, on_cpu=lambda n: n % 2 == 0)
    assert close(answer(engine), answer(made.cpu_only), EPS)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("handoff", Handoff)
def test_a_step_gives_the_same_bits_again(there: Made, handoff: Handoff, exact: bool) -> None:
    """Replayed after the session was cut back, fifty times: no step sees anything of another."""
    session = there.engine(there.placed(handoff=handoff), exact=exact).session()
    session.feed(IDS)
    first = session.feed([5], defer=2).values.copy()
    for i in range(50):
        session.truncate(len(IDS))
        session.feed([i], defer=i % 3)
        session.truncate(len(IDS))
        np.testing.assert_array_equal(session.feed([5], defer=2).values, first)


def test_captured_steps_of_each_size_give_what_steps_without_a_graph_give(there: Made) -> None:
    """Graphs of one pool, made late and replayed in any order; rows that fill a graph up."""
    for mask in ("all", "some", "none"):
        engine = there.engine(there.placed(mask, streams=16))
        plain = there.engine(there.placed(mask, streams=16))
        plain._steps._ways = replace(plain._ways, decode=None)
        batches = [Many(each) for each in (engine, plain)]
        for n in (3, 1, 16, 2, 5, 3, 1):
            together, wanted = (many.step(n) for many in batches)
            assert all(close(a, b, EPS) for a, b in zip(together, wanted, strict=True)), (mask, n)


class Many:
    """Sequences of different lengths, of which the first few go on with each step."""

    def __init__(self, engine: DeviceEngine) -> None:
        self.engine, self.sequences = engine, []
        for n in range(16):
            self.sequences.append(engine.sequence())
            self._feed([(self.sequences[-1], IDS[n : 2 * n + 3])])

    def step(self, n: int) -> list[F32Array]:
        return self._feed([(each, [i + n]) for i, each in enumerate(self.sequences[:n])], defer=1)

    def _feed(self, some: list[tuple[Sequence, list[int]]], defer: int = 0) -> list[F32Array]:
        runs = [s.extend(np.array(ids, np.int32), defer=defer) for s, ids in some]
        found = [each.values.copy() for each in self.engine.run(Batch(tuple(runs)))]
        for (sequence, _), run in zip(some, runs, strict=True):
            sequence.commit(run)
        return found


def test_chosen_experts_are_counted(there: Made) -> None:
    engine = there.engine(there.placed())
    answer(engine)
    tokens = len(IDS) + len(ANSWER)
    assert (engine.chosen().sum(axis=1) == tokens * there.model.spec.top_k).all()


# -- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("handoff", Handoff)
def test_an_error_of_the_cpu_ends_one_step(
    there: Made, handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = there.engine(there.placed(handoff=handoff)).session()
    session.feed(IDS[:20])
    wanted = session.feed([7]).values.copy()
    enter = HostExperts.enter

    def poisoned(
        self: HostExperts, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool
    ) -> None:
        enter(self, layer, x, torch.full_like(ids, 1000), gate)

    with monkeypatch.context() as patch:
        patch.setattr(HostExperts, "enter", poisoned)
        with pytest.raises(KtError, match="expert 1000, outside"):
            session.feed(IDS[:9])
    session.truncate(20)
    np.testing.assert_array_equal(session.feed([7]).values, wanted)


@pytest.mark.parametrize("handoff", Handoff)
def test_interrupted_while_the_step_runs(
    there: Made, handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the graph was launched and nobody has waited for it."""
    engine = there.engine(there.placed(handoff=handoff))
    session = engine.session()
    session.feed(IDS)
    wanted = session.feed([7], defer=2).values.copy()
    check = HostExperts.check

    def interrupted(self: HostExperts) -> None:
        raise KeyboardInterrupt

    for _ in range(20):
        session.truncate(len(IDS))
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.segments[0].stream), "sleep", lambda _: None)
            patch.setattr(HostExperts, "check", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.feed([9], defer=1)
        assert HostExperts.check is check and session.length == len(IDS)
        np.testing.assert_array_equal(session.feed([7], defer=2).values, wanted)


@pytest.fixture
def small_memory() -> Iterator[None]:
    """Less than any model needs."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-7)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_runs_out_at_load_is_known_for_it(there: Made, small_memory: None) -> None:
    with pytest.raises(OutOfDeviceMemory):
        there.engine(there.placed("all"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    answer(there.engine(there.placed("all")))


def test_memory_that_runs_out_in_a_prompt_ends_one_step(made: Made, there: Made) -> None:
    engine, wanted = there.engine(there.placed()), made.cpu_only.session()
    session, stream = engine.session(), engine.segments[0].stream
    try:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-7)
        # What the allocator still holds may do for a while: it is taken first, in the stream that would get it.
        held = []
        for size in (1 << 19, 1 << 16, 1 << 13, 1 << 9):  # the smallest of the model's fit nowhere
            with pytest.raises(torch.OutOfMemoryError), stream.running():
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device=GPU))
        with pytest.raises(OutOfDeviceMemory):
            session.feed(IDS)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    held.clear()
    assert session.length == 0
    assert close(session.feed(IDS).values, wanted.feed(IDS).values, EPS)


def test_memory_comes_back(there: Made) -> None:
    """Pinned and the device's: ten engines, one after the other, need no more than two."""
    gc.collect()
    sizes = []
    for _ in range(10):
        answer(there.engine(there.placed(handoff=Handoff.FLAGS)))
        gc.collect()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] <= sizes[1]


def test_adapters_take_turns_in_captured_steps(made: Made, there: Made) -> None:
    """The same graphs with each adapter, without one, and with one under another's number."""
    cpu = load_engine(made.path, context=CONTEXT, threads=TWO, exact=True, adapters=ROOM)
    assert cpu.adapters is not None
    given = [random_adapter(cpu, seed) for seed in (1, 2, 3)]
    placed = there.placed("none", adapters=room_beside(cpu, *given))
    engine = there.engine(placed)
    assert engine.adapters is not None
    for each in given[:2]:
        cpu.adapters.attach(each)
        engine.adapters.attach(each)
    for number in (1, 2, 0, 1):
        assert close(adapted(engine, number), adapted(cpu, number), EPS), number
    for of in (cpu, engine):
        assert of.adapters is not None
        of.adapters.detach(AttachedAdapter(1, ""))
        of.adapters.attach(given[2])
    assert close(adapted(engine, 1), adapted(cpu, 1), EPS)


def adapted(engine: Engine | DeviceEngine, number: int) -> F32Array:
    """Logits of ANSWER after IDS, with an adapter; 0: without."""
    session = engine.session()
    attached = AttachedAdapter(number, str(number)) if number else None
    session.sequence.adopt(IDS[:1], salt=str(object()), adapter=attached)
    session.feed(IDS)
    return np.stack([session.feed([token]).values.copy() for token in ANSWER])
