"""Deferral and offload through the binding: a fake stream calls the addresses in order, as a CUDA graph would.

The C tests say what is computed; here it is the arrays, addresses, errors and lifetimes that are looked at.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from processes import state_of
from waits import until

from ktcli.errors import KtError, NativeError
from ktcli.native import (
    Arena,
    Batch,
    Format,
    Offload,
    Pool,
    Program,
    Run,
    Update,
    View,
    Weight,
    packed_bytes,
)

LAYERS, TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 3, 2, 6, 4, 32, 16
F32 = Format("f32", 32)
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def weights(pool: Pool, n: int, k: int, seed: int) -> Weight:
    """Random matrices, one per expert."""
    size_bytes = packed_bytes(F32, n, k) * EXPERTS
    arena = Arena(size_bytes)
    weight = Weight(F32, n, k, EXPERTS, arena.address, arena)
    pool.fill_random(weight, seed)
    return weight


@dataclass
class Layers:
    """A program of a few layers with deferral; two inputs and two routings take turns."""

    program: Program
    x: list[View]
    late_out: list[View]
    out: View
    given: list[int]
    now: list[int]
    late: list[int]
    elsewhere: np.ndarray

    def write(self, layer: int, seed: int) -> None:
        """What the device leaves for a layer: its input, which experts, with which weight."""
        rng = np.random.default_rng([seed, layer])
        self.program.rows(self.x[layer % 2], TOKENS)[:] = rng.normal(size=(TOKENS, HIDDEN))
        ids, gate = self.program.routing(self.given[layer % 2], TOKENS, TOP_K)
        ids[:] = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]
        gate[:] = rng.random((TOKENS, TOP_K))

    def alone(self, seed: int, defer: int, adapter: int = 0) -> np.ndarray:
        """[L, T, H]: the parts one by one, each token with the same depth."""
        none = np.zeros(1, np.int32)
        run = Run(np.zeros(TOKENS, np.int32), 0, none, TOKENS, defer=defer, adapter=adapter)
        outs = []
        for layer in range(LAYERS):
            self.write(layer, seed)
            self.program.run_part(Batch((run,)), self.now[layer])
            outs.append(self.program.rows(self.out, TOKENS).copy())
            if self.late[layer] >= 0:
                self.program.run_part(Batch((run,)), self.late[layer])
        return np.stack(outs)


@pytest.fixture
def layers() -> Layers:
    pool = Pool(2, spin_us=10)
    gate_up, down = weights(pool, 2 * WIDTH, HIDDEN, 1), weights(pool, HIDDEN, WIDTH, 2)
    p = Program(pool, max_tokens=TOKENS, max_outputs=1, exact=True)
    p.take_adapters(2, 4)
    x, late_out = ([p.buffer(HIDDEN) for _ in range(2)] for _ in range(2))
    given = [p.given(EXPERTS, TOP_K) for _ in range(2)]
    made = Layers(p, x, late_out, p.buffer(HIDDEN), given, [], [], np.zeros(EXPERTS, np.uint8))
    for i in range(LAYERS):
        last = i == LAYERS - 1
        made.now.append(p.part())
        p.input(x[i % 2])
        mask = {"elsewhere": made.elsewhere, "experts": EXPERTS}
        now = p.append("split", routing=given[i % 2], **mask, defers=not last)
        matrices = {"gate_up": [gate_up], "down": [down]}
        p.append("experts", (made.out, x[i % 2]), routing=now, **matrices)
        if i:
            p.append("carry", (made.out, late_out[(i - 1) % 2]))
        made.late.append(-1 if last else p.part())
        if not last:
            p.append("experts", (late_out[i % 2], x[i % 2]), routing=now + 1, **matrices)
    p.finish()
    return made


def run_stream(layers: Layers, offload: Offload, seed: int) -> np.ndarray:
    """One step of a device that enters and leaves by calls, or by flags; what each layer gave."""
    submit, wait = HostFunction(offload.submit), HostFunction(offload.wait)
    outs = []
    for layer in range(LAYERS):
        layers.write(layer, seed)
        if offload.flags is None:
            submit(offload.ticket(layer))
            wait(offload.ticket(layer))
        else:
            offload.flags[layer] = 1
            while not offload.flags[LAYERS + layer]:
                time.sleep(0)
            offload.flags[LAYERS + layer] = 0
        outs.append(layers.program.rows(layers.out, TOKENS).copy())
    return np.stack(outs)


@pytest.mark.parametrize("by_flags", [False, True], ids=["calls", "flags"])
def test_stream_gives_what_the_parts_give(layers: Layers, by_flags: bool) -> None:
    flags = np.zeros(2 * LAYERS, np.int32) if by_flags else None
    offload = Offload(layers.program, layers.now, layers.late, flags=flags)
    for step, depths in enumerate(((0, 0), (2, 2), (1, 0), (0, 2), (0, 0))):
        want = np.stack([layers.alone(step, n)[:, t] for t, n in enumerate(depths)], axis=1)
        offload.begin(TOKENS, np.array(depths, np.int32))
        np.testing.assert_array_equal(run_stream(layers, offload, step), want)
        offload.result()
        spans = offload.spans()
        ran = [(i, late) for i in range(LAYERS) for late in (False, True)]
        ran = [each for each in ran if not each[1] or (any(depths) and each[0] < LAYERS - 1)]
        assert [(span.layer, span.deferred) for span in spans] == ran
        times = [ns for span in spans for ns in (span.start_ns, span.end_ns)]
        assert times == sorted(times) and times[-1] <= time.monotonic_ns()


def test_steps_have_the_adapter_that_is_used(layers: Layers) -> None:
    """Of each product of experts, those of deferred ones too; an offload begins without one."""
    draw, program = np.random.default_rng(6), layers.program
    for number in (1, 2):
        for operation, label in enumerate(program.labels):
            for part, (k, panels) in enumerate(((HIDDEN, 2), (WIDTH, 2))):
                if label == "experts":
                    a, b = draw.random((EXPERTS, 3, k)), draw.random((EXPERTS, panels, 3, 16))
                    update = Update(3, 0, 1, 0.1, *(each.astype(np.float32) for each in (a, b)))
                    program.adapt(number, operation, part, (update,))
    offload = Offload(program, layers.now, layers.late)
    plain = layers.alone(1, 2)
    for number in (None, 1, 0, 2, 1):
        if number is not None:
            offload.use_adapter(number)
        want = layers.alone(1, 2, number or 0)
        assert number in (None, 0) or np.abs(want - plain).max() > 0.1
        offload.begin(TOKENS, np.full(TOKENS, 2, np.int32))
        np.testing.assert_array_equal(run_stream(layers, offload, 1), want)
        offload.result()
    for number in (-1, 3):
        with pytest.raises(KtError, match=rf"adapter is {number}, outside 0\.\.2"):
            offload.use_adapter(number)
        offload.begin(TOKENS)
        offload.result()
    offload.begin(TOKENS)
    np.testing.assert_array_equal(run_stream(layers, offload, 1), layers.alone(1, 0, 1))
    offload.result()


def test_elsewhere_is_read_at_each_run(layers: Layers) -> None:
    whole = layers.alone(1, 0)
    layers.elsewhere[::2] = 1
    even = layers.alone(1, 0)
    layers.elsewhere[:] = 1 - layers.elsewhere
    np.testing.assert_allclose(even + layers.alone(1, 0), whole, rtol=1e-5, atol=1e-6)


def test_chosen_counts_what_was_given(layers: Layers) -> None:
    counts = layers.program.chosen(layers.given[1])
    layers.alone(5, 1)
    ids, _ = layers.program.routing(layers.given[1], TOKENS, TOP_K)
    np.testing.assert_array_equal(counts, np.bincount(ids.ravel(), minlength=EXPERTS))
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 0
    with pytest.raises(NativeError, match="not counted"):
        layers.program.chosen(99)


def test_arrays_outlive_the_program(layers: Layers) -> None:
    program, given = layers.program, layers.given[0]
    layers.write(0, 3)
    ids, gate = program.routing(given, TOKENS, TOP_K)
    counts, before = program.chosen(given), (ids.copy(), gate.copy())
    layers.program = program = None
    gc.collect()
    assert counts.sum() == 0
    np.testing.assert_array_equal(ids, before[0])
    np.testing.assert_array_equal(gate, before[1])


def test_errors_come_after_the_step(layers: Layers) -> None:
    offload = Offload(layers.program, layers.now, layers.late)
    submit, wait = HostFunction(offload.submit), HostFunction(offload.wait)
    offload.begin(TOKENS)
    layers.write(0, 1)
    layers.program.routing(layers.given[0], TOKENS, TOP_K)[0][1, 2] = EXPERTS
    for layer in range(LAYERS):
        submit(offload.ticket(layer))
        wait(offload.ticket(layer))
    with pytest.raises(KtError, match=r"layer 0: token 1 .* expert 6, outside -1\.\.5"):
        offload.result()
    assert len(offload.spans()) == 1
    with pytest.raises(KtError, match=r"n_tokens is 3, outside 1\.\.2"):
        offload.begin(TOKENS + 1)
    offload.begin(TOKENS)
    offload.result()


def test_a_hang_ends(layers: Layers) -> None:
    flags = np.zeros(2 * LAYERS, np.int32)
    offload = Offload(layers.program, layers.now, layers.late, timeout_ms=5, flags=flags)
    offload.begin(1)
    while not flags[LAYERS:].all():
        time.sleep(0.001)
    with pytest.raises(KtError, match="nothing happened for 5 ms"):
        offload.result()


def _sleeps(thread: int | None) -> bool:
    """Whether a thread sleeps, and did not just wait for Python's lock, which is free meanwhile."""
    time.sleep(0.001)
    return state_of(Path(f"/proc/self/task/{thread}")) == "S"


def test_freed_while_the_stream_waits(layers: Layers) -> None:
    offload = Offload(layers.program, layers.now, layers.late)
    offload.begin(1)
    stream = threading.Thread(target=HostFunction(offload.wait), args=[offload.ticket(1)])
    stream.start()
    looks = [stream.native_id] * 9
    until(lambda: all(map(_sleeps, looks)))  # in `wait`, which no thread may enter any more then
    offload.close()
    stream.join(60)
    assert not stream.is_alive()


def test_refusals(layers: Layers) -> None:
    program, now, late = layers.program, layers.now, layers.late
    with pytest.raises(NativeError, match="2 deferred parts for 3 layers"):
        Offload(program, now, late[:2])
    with pytest.raises(NativeError, match="flags are 6 int32"):
        Offload(program, now, late, flags=np.zeros(6, np.int64))
    with pytest.raises(NativeError, match="layer 0 runs parts 77"):
        Offload(program, [77, *now[1:]], late)
    with pytest.raises(NativeError, match="layer 3 of 3"):
        Offload(program, now, late).ticket(3)


def test_what_a_program_cannot_be_told() -> None:
    program = Program(Pool(1), max_tokens=2, max_outputs=1, exact=True)
    x, given = program.buffer(4), program.given(EXPERTS, TOP_K)
    for message, name, views, facts in (
        ("no operation 'run'", "run", (), {}),
        ("no operation 'input'", "input", (x,), {}),
        ("add with 2 views, not 3", "add", (x, x), {}),
        ("add takes only views", "add", (x, x, x), {"eps": 1.0}),
        ("kt_norm has no field 'epsilon'", "norm", (x, x), {"epsilon": 1.0}),
        ("array of float64", "norm", (x, x), {"gain": np.ones(4)}),
        ("not contiguous", "norm", (x, x), {"gain": np.ones(8, np.float32)[::2]}),
        ("2 slices of a weight for 1 nodes", "linear", (x, x), {"weight": [None, None]}),
        (
            "each of 6 experts",
            "split",
            (),
            {"routing": given, "elsewhere": np.zeros(5, np.uint8), "experts": 5},
        ),
    ):
        with pytest.raises(NativeError, match=message):
            program.append(name, views, **facts)
