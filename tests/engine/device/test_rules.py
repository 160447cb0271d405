"""Rules of steps: what a captured one may do, rows that do not see each other, and steps that end early."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid import ANSWER, IDS, Made, answer
from shapes import shape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ktcli.engine.device import experts as experts_module
from ktcli.engine.device import kernelchoice, segments
from ktcli.engine.device.engine import DeviceEngine
from ktcli.engine.device.experts import HostExperts, spin_us
from ktcli.engine.device.fallbacks import Failures, KnownFailures
from ktcli.engine.device.handoff import Handoff
from ktcli.engine.device.passes import LongPrompts
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.runners import Coupled, Resident
from ktcli.engine.device.steps import SegmentForward
from ktcli.engine.device.stream import HostStream
from ktcli.errors import DeviceError, KtError
from ktcli.hardware.profile import read_machine
from ktcli.measure.policy import Policy
from ktcli.native import Batch
from ktcli.ops.part import LayerPart
from ktcli.ops.torch import functions, packed
from ktcli.ops.torch.backend import TorchBackend, Weights
from ktcli.ops.torch.functions import Rows, summarize
from ktcli.ops.torch.kernels import TORCH
from ktcli.ops.torch.packed import Packed, PackedStack, PlainMatrix
from ktcli.planner.host import host_of
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.placement import place
from ktcli.planner.plan import Request

GPU = torch.device("meta")  # tensors without values: what a GPU has, as the host sees it


# -- what a captured step may do -----------------------------------------------------------------------


class NothingFromTheHost(TorchDispatchMode):
    """Every operation gives and takes tensors of the device only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(each, torch.Tensor):
                assert each.device == GPU, f"{func} with a tensor of {each.device}"
        return out


class FakeHost:
    """Experts in main memory, of every layer; copies are looked at and not made."""

    def has(self, layer: int) -> bool:
        return True

    def has_block(self, part: LayerPart) -> bool:
        return False

    def enter(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool) -> None:
        assert not sent
        assert all(each.is_contiguous() for each in (x, ids, gate))
        assert (x.dtype, ids.dtype, gate.dtype) == (torch.float32, torch.int32, torch.float32)
        self.width = x.shape[1]

    def leave(self, layer: int, n_tokens: int) -> Tensor:
        return torch.empty(n_tokens, self.width, device=GPU)


def on_gpu(t: Tensor) -> Tensor:
    """A tensor of a GPU that has no values."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU)


def moved(w: Packed | PlainMatrix) -> Packed | PlainMatrix:
    return (
        PlainMatrix(on_gpu(w.data))
        if isinstance(w, PlainMatrix)
        else Packed(w.format, w.n, w.k, on_gpu(w.data))
    )


@contextmanager
def fresh_tables() -> Iterator[None]:
    """What is kept per device must not be kept from a device that is none."""
    kept = functions.frequencies, packed._codebook
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize("batch", [1, 4])
def test_a_captured_step_neither_waits_nor_touches_the_host(made: Made, batch: int) -> None:
    """On tensors without values: a result that is looked at, a shape that depends on data, or a tensor of the
    host among them would raise. The second run is what is captured, as on a GPU."""
    loaded, spec = made.everything, made.model.spec
    with fresh_tables():
        weights = Weights(
            {name: moved(w) for name, w in loaded.weights.matrices.items()},
            {name: on_gpu(v) for name, v in loaded.weights.vectors.items()},
        )
        stacks = [
            PackedStack(on_gpu(s.slots), moved(s.gate_up), moved(s.down)) for s in loaded.stacks
        ]
        runner = Coupled(FakeHost(), Resident(TORCH, stacks))  # type: ignore[arg-type]
        caches = [
            torch.empty(64 * 5 * spec.states[0].position_elements, dtype=torch.bfloat16, device=GPU)
        ]
        chosen = torch.empty(made.shape, dtype=torch.int64, device=GPU)
        forward = SegmentForward(
            made.model, weights, caches * spec.layers, TORCH, chosen, layers=range(spec.layers)
        )
        embedded = torch.empty(batch, spec.hidden, device=GPU)
        positions = torch.empty(batch, dtype=torch.int64, device=GPU)
        pages = torch.empty(batch, 4, dtype=torch.int32, device=GPU)
        temperature = torch.empty(batch, device=GPU)
        ids = torch.empty(batch, dtype=torch.int64, device=GPU)
        live = torch.empty(batch, dtype=torch.bool, device=GPU) if batch > 1 else None
        rows = Rows(positions, pages, 1, None, ids, live)
        shapes = []
        for watched in (nullcontext(), NothingFromTheHost()):
            with watched:
                logits = forward(embedded, (rows,), None, runner)
                shapes.append([each.shape for each in (logits, *summarize(logits, temperature))])
    assert shapes[0] == shapes[1] and shapes[0][0] == (batch, spec.vocab)


class Watched(HostStream):
    """Notes which memory copies touch, and can stop in the middle.

    Attributes:
        copies: (address of the host's side, bytes), of each copy.
        stop_at: the copy that is interrupted; None: none.
    """

    def __init__(self, host: list[range]) -> None:
        super().__init__()
        self.host = host  # of all streams of an engine
        self.copies: list[tuple[int, int]] = []
        self.stop_at: int | None = None

    def pin(self, address: int, size_bytes: int) -> None:
        self.host.append(range(address, address + size_bytes))

    def pinned(self, size_bytes: int) -> Tensor:
        made = super().pinned(size_bytes)
        self.host.append(range(made.data_ptr(), made.data_ptr() + size_bytes))
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.stop_at is not None:
            self.stop_at -= 1
            if self.stop_at < 0:
                self.stop_at = None
                raise KeyboardInterrupt
        sides = [t for t in (target, source) if any(t.data_ptr() in r for r in self.host)]
        assert len(sides) == 1, "one side of a copy is pinned"
        self.copies.append((sides[0].data_ptr(), sides[0].nbytes))
        super().copy(target, source)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[DeviceEngine, Watched]]:
    """Makes an engine, and the stream it computes in."""

    def make(made: Made, **placed: object) -> tuple[DeviceEngine, Watched]:
        streams: list[Watched] = []
        host: list[range] = []

        def new(device: torch.device, number: int) -> Watched:
            streams.append(Watched(host))
            return streams[-1]

        monkeypatch.setattr(segments, "stream_on", new)
        return made.engine(made.placed(**placed)), streams[0]

    return make


def test_a_step_that_is_not_captured_runs_anew(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning, and the same bits."""
    wanted, asked = answer(made.engine(made.placed())), []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise DeviceError("the GPU failed during capturing a decode step: not permitted")

    monkeypatch.setattr(HostStream, "capture", refuse)
    kept: list[Failures] = []
    engine = made.engine(made.placed(streams=2), known_failures=KnownFailures(keep=kept.append))
    (warning,) = engine.warnings
    assert "not permitted" in warning and "slower" in warning
    np.testing.assert_array_equal(answer(engine), wanted)
    two = [engine.sequence().extend(np.array([7], np.int32)) for _ in range(2)]
    assert len(engine.run(Batch(tuple(two)))) == 2
    assert len(asked) == 1  # the answer is remembered
    assert kept == [Failures(graphs="the GPU failed during capturing a decode step: not permitted")]
    again = made.engine(
        made.placed(), known_failures=KnownFailures(kept[0], "2026-11-24", kept.append)
    )
    np.testing.assert_array_equal(answer(again), wanted)
    (known,) = again.warnings
    assert known.startswith(warning) and "2026-11-24; after kt doctor --measure" in known
    assert len(asked) == 1 and len(kept) == 1


def test_a_larger_step_that_is_not_captured_is_said_once(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made when it is first needed, long after the load."""
    engine, kept = made.engine(made.placed(streams=2)), []
    engine._choice.known = KnownFailures(keep=kept.append)

    def refuse(*_: object) -> None:
        raise DeviceError("the GPU failed during capturing a decode step: not permitted")

    monkeypatch.setattr(HostStream, "capture", refuse)
    for _ in range(2):
        two = [engine.sequence().extend(np.array([7], np.int32)) for _ in range(2)]
        assert len(engine.run(Batch(tuple(two)))) == 2
    assert [each.message for each in caplog.records] == list(engine.warnings)
    assert len(kept) == len(engine.warnings) == 1


@pytest.mark.parametrize("when", ["load", "prompt"])
def test_a_kernel_that_fails_later_is_done_without(
    when: str, made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A larger launch may fail where the first kernel ran: one warning, the same bits, and it is remembered."""
    wanted = answer(made.engine(made.placed(), exact=False))
    error = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    calls = []

    def broken(x: Tensor, *_: object, **__: object) -> Tensor:
        calls.append(x.shape[0])
        if when == "prompt" and x.shape[0] == 1:
            return TORCH["linear"](x, *_, **__)
        raise error("out of resource: shared memory, Required: 300000")

    fast = replace(TORCH, name="triton", operations={**TORCH.operations, "linear": broken})
    monkeypatch.setattr(kernelchoice, "kernels_for", lambda *_, **__: fast)
    kept: list[Failures] = []
    engine = made.engine(made.placed(), exact=False, known_failures=KnownFailures(keep=kept.append))
    assert kept == []  # not before a step ran without it
    np.testing.assert_array_equal(answer(engine), wanted)
    (warning,), (failures,) = engine.warnings, kept
    assert "300000" in failures.kernels and failures == Failures(kernels=failures.kernels)
    assert failures.kernels in warning and "much slower" in warning and "found on" not in warning
    assert [each.message for each in caplog.records] == ([warning] if when == "prompt" else [])
    before = len(calls)
    answer(engine)
    again = made.engine(
        made.placed(), exact=False, known_failures=KnownFailures(failures, "2026-11-24")
    )
    np.testing.assert_array_equal(answer(again), wanted)
    assert len(calls) == before and len(kept) == 1
    assert again.warnings == (
        f"{warning} (found on 2026-11-24; after kt doctor --measure, the next start tries again)",
    )


def test_a_thread_that_waits_beside_experts_of_the_cpu_sleeps(made: Made, watched) -> None:
    """Its core has other work then."""
    for mask, sleeps in (("some", True), ("all", False)):
        engine, stream = watched(made, mask=mask)
        session = engine.session()
        session.feed(IDS[:70])
        stream.log.clear()
        session.feed([7])
        assert ("sleep" in {call.name for call in stream.log}) == sleeps


@pytest.mark.thorough
@pytest.mark.parametrize("handoff", Handoff)
def test_kernels_may_take_longer_to_compile_than_a_step(
    made: Made, handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog takes no compiler for a hang."""
    monkeypatch.setattr(experts_module, "WATCHDOG_MS", 400)
    compiled = []

    def slow(*given: Any, **more: Any) -> Any:
        if not compiled:
            compiled.append(1)
            time.sleep(1)
        return TORCH["linear"](*given, **more)

    kernels = replace(TORCH, operations={**TORCH.operations, "linear": slow})
    monkeypatch.setattr(kernelchoice, "kernels_for", lambda *_, **__: kernels)
    made.engine(made.placed("none", handoff=handoff), exact=False)
    assert compiled


def test_threads_spin_for_a_layer_where_cores_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than one takes on either side; one core is left to the thread of the device's stream."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    gpu = torch.device("cuda")
    assert [spin_us(gpu, n) for n in (15, 16)] == [5000, 200] and spin_us(
        torch.device("cpu"), 4
    ) == 200


def test_no_step_notes_a_way_back(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """For gradients, which costs every launch."""
    seen = []
    do = TorchBackend.do

    def noted(self: TorchBackend, operation: Any) -> Any:
        seen.append(torch.is_inference_mode_enabled())
        return do(self, operation)

    monkeypatch.setattr(TorchBackend, "do", noted)
    session = made.engine(made.placed()).session()
    session.feed(IDS)
    session.feed([7])
    assert len(seen) > 2 and all(seen)


def test_steps_touch_the_same_pinned_memory(made: Made, watched) -> None:
    engine, stream = watched(made)
    session, seen = engine.session(), []
    session.feed(IDS[:70])
    for i, token in enumerate(ANSWER):
        stream.copies.clear()
        session.feed([token], defer=i % 3, temperature=0.5 * i)
        seen.append(list(stream.copies))
    assert seen[0] and all(each == seen[0] for each in seen)


# -- steps that fail or are broken off -----------------------------------------------------------------


@pytest.mark.parametrize("handoff", Handoff)
def test_a_failed_step_is_one_sentence_and_the_next_one_works(
    made: Made, handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made.engine(made.placed(handoff=handoff)).session()
    session.feed(IDS[:20])
    wanted = session.feed([7], defer=2).values.copy()
    session.truncate(20)
    enter = HostExperts.enter

    def poisoned(
        self: HostExperts, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool
    ) -> None:
        enter(self, layer, x, torch.full_like(ids, 1000), gate)

    for feed in (lambda: session.feed([7], defer=2), lambda: session.feed(IDS[:9])):
        with monkeypatch.context() as patch:
            patch.setattr(HostExperts, "enter", poisoned)
            with pytest.raises(KtError, match="expert 1000, outside"):
                feed()
        assert session.length == 20
        np.testing.assert_array_equal(session.feed([7], defer=2).values, wanted)
        session.truncate(20)


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("threshold", "handoff"), [(None, Handoff.CALLS), (None, Handoff.FLAGS), (0, Handoff.CALLS)]
)
def test_what_is_interrupted_counts_for_nothing(
    made: Made, watched, handoff: Handoff, threshold: int | None
) -> None:
    """Ctrl-C at any copy of a token or a prompt: the session stays as it was, and goes on with the same bits."""
    long = LongPrompts(threshold, 40)
    engine, stream = watched(made, handoff=handoff, long_prompts=long)
    session, chance = engine.session(), random.Random(1)
    turns = (IDS[:9], 0), ([4], 2), ([5], 2)
    straight = [session.feed(turn, defer=depth).values.copy() for turn, depth in turns]
    for _ in range(4):
        session.truncate(0)
        for (turn, depth), wanted in zip(turns, straight, strict=True):
            before, stream.stop_at = session.length, chance.randrange(14)
            try:
                found = session.feed(turn, defer=depth).values
            except KeyboardInterrupt:
                assert session.length == before
                found = session.feed(turn, defer=depth).values
            stream.stop_at = None
            np.testing.assert_array_equal(found, wanted)


def test_an_engine_goes_with_the_last_who_needs_it(made: Made) -> None:
    """Without the collector: what it would free some time later, the next engine has no room for."""
    engine = made.engine(made.placed(), policy=Policy.GPU_STREAM)
    memory = weakref.ref(engine._on_device.embedding), weakref.ref(engine._cache)
    session = engine.session()
    session.feed(IDS[:5])
    gc.disable()
    try:
        del engine, session
        assert [each() for each in memory] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("threshold", "chunk"), [(0, 4), (600, 550), (600, 700), (None, 4096)])
def test_chunks_are_no_longer_than_their_way_can_take(threshold: int | None, chunk: int) -> None:
    long = LongPrompts(threshold, chunk)
    for left in (1, 2, 5, 599, 600, 601, 5000):
        size = long.chunk_tokens(left)
        assert 1 <= size <= min(left, chunk if long.streams(size) else 512)
        assert size <= long.most_tokens
    assert long.most_tokens == (max(chunk, 512) if long.streams(chunk) else 512)


def test_a_model_that_is_all_on_the_device_reads_prompts_in_planned_chunks() -> None:
    host = host_of(read_machine(Path("workstation-4090-512gb")), torch=True)
    for experts, whole in ((None, True), (64, False)):
        plan = place(shape("qwen3-30b-a3b"), host, Request(gpu_experts=experts))
        device = plan.device
        assert device is not None and device.mask.all() == whole and device.chunk > PREFILL_CHUNK
        long = Placement.of(plan, device).long_prompts
        assert long.short == (device.chunk if whole else PREFILL_CHUNK)
        assert long.chunk_tokens(100_000) == device.chunk
