"""Depth of deferral and the simulated step: the formulas, and that both say the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktcli.planner.deferral import (
    IMMEDIATE,
    Times,
    context_buckets,
    deferred,
    depth,
    layer_seconds,
    limit,
    saturating,
)
from ktcli.planner.simulate import CPU, GPU, Layer, simulate

TIMES = st.builds(
    Times,
    expert_s=st.floats(1e-6, 1e-3),
    device_s=st.floats(1e-6, 4e-3),
    shared_s=st.floats(0, 2e-3),
)
HITS = st.floats(0.05, 10)


def stacked(times: Times, hits: float, n: int) -> list[Layer]:
    """Equal layers; T_g is cut into the GPU's part and both copies."""
    send, fetch = 0.1 * times.device_s, 0.2 * times.device_s
    one = Layer(0.7 * times.device_s, times.shared_s, send, fetch, hits, times.expert_s)
    return [one] * n


def steady_s(times: Times, hits: float, n: int) -> float:
    """Time per layer of the simulation, without its ends."""
    short, long = (simulate(stacked(times, hits, layers), n).step_s for layers in (40, 80))
    return (long - short) / 40


def test_the_published_split():
    """74 % utilisation of the CPU without deferral: 5 + 3 experts, 1.35 times as fast (1.33 reported)."""
    times = Times(expert_s=1.0, device_s=0.351 * 8)
    assert 8 / layer_seconds(times, 8) == pytest.approx(0.74, abs=0.001)
    assert depth(times, 8, 8) == saturating(times) == 3
    gain = layer_seconds(times, 8) / layer_seconds(times, 8, 3)
    assert gain == pytest.approx(1.35, abs=0.005)
    assert steady_s(times, 8, 0) / steady_s(times, 8, 3) == pytest.approx(1.35, abs=0.005)


@given(times=TIMES, hits=HITS, n=st.integers(0, 8))
def test_the_simulation_settles_on_the_formula(times: Times, hits: float, n: int):
    assert steady_s(times, hits, n) == pytest.approx(layer_seconds(times, hits, n), rel=0.01)


@given(times=TIMES, hits=HITS, top_k=st.integers(1, 12))
def test_the_depth_is_the_least_that_is_best(times: Times, hits: float, top_k: int):
    hits = min(hits, top_k)
    n = depth(times, hits, top_k)
    assert 0 <= n <= limit(hits, top_k) <= max(0, min(hits - IMMEDIATE, top_k / 2))
    allowed = [layer_seconds(times, hits, m) for m in range(limit(hits, top_k) + 1)]
    assert allowed[n] == pytest.approx(min(allowed))
    assert all(allowed[m] > allowed[n] for m in range(n))
    assert n <= saturating(times)


@given(times=TIMES, top_k=st.integers(2, 12))
def test_without_shared_experts_it_is_the_least_that_keeps_the_cpu_busy(times: Times, top_k: int):
    alone = Times(times.expert_s, times.device_s)
    expected = min(saturating(alone), limit(top_k, top_k))
    assert depth(alone, top_k, top_k) == expected


@given(times=TIMES, hits=HITS)
def test_a_slower_gpu_never_defers_less(times: Times, hits: float):
    alone = Times(times.expert_s, times.device_s)
    slower = Times(times.expert_s, 1.5 * times.device_s)
    assert depth(alone, hits, 8) <= depth(slower, hits, 8)


def test_nothing_waits_for_a_gpu_that_is_not_there():
    assert depth(Times(1e-4, 0.0), 8, 8) == 0
    assert depth(Times(0.0, 1e-4), 0, 8) == 0


def test_two_stay_immediate():
    assert [limit(hits, 8) for hits in (0, 1.9, 2, 2.9, 3, 5.5, 8)] == [0, 0, 0, 0, 1, 3, 4]
    assert deferred(2.5, 4) == 0.5
    assert deferred(1.5, 4) == 0.0


def test_buckets_grow_fourfold():
    assert context_buckets(1000) == (0,)
    assert context_buckets(2048) == (0,)
    assert context_buckets(131072) == (0, 2048, 8192, 32768)


# --- events -----------------------------------------------------------------------------------------


@given(
    layers=st.lists(
        st.builds(
            Layer,
            *[st.floats(0, 1e-3)] * 4,
            hits=st.sampled_from([0.0, 1.5, 4.0, 8.0]),
            expert_s=st.floats(1e-6, 1e-3),
        ),
        min_size=1,
        max_size=12,
    ),
    n=st.integers(0, 6),
)
def test_what_holds_for_every_step(layers: list[Layer], n: int):
    step = simulate(layers, n, tail_s=1e-4)
    for where in (GPU, CPU):
        spans = [span for span in step.spans if span.where == where]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    work = sum(layer.hits * layer.expert_s for layer in layers)
    assert step.busy_s(CPU) == pytest.approx(work)  # nothing is dropped
    assert step.step_s >= max(work, step.busy_s(GPU)) * (1 - 1e-9)
    sent = {span.layer: span.end_s for span in step.spans if span.what == "send"}
    for span in step.spans:
        assert span.end_s <= step.step_s * (1 + 1e-9)
        if span.where == CPU and span.layer in sent:
            assert span.start_s >= sent[span.layer]


def test_the_last_layer_with_experts_on_the_cpu_defers_nothing():
    layers = [Layer(1.0, 0.0, hits=8, expert_s=1.0)] * 3 + [Layer(1.0, 2.0)]
    late = [span.layer for span in simulate(layers, 3).spans if span.what == "deferred"]
    assert late == [0, 1]


def test_one_layer_by_hand():
    """Attention 2, send 1, shared 1, three experts of 2 each, fetch 1: the GPU waits from 4 to 9."""
    step = simulate([Layer(2.0, 1.0, 1.0, 1.0, hits=3, expert_s=2.0)], 1)
    assert [(s.where, s.what, s.start_s, s.end_s) for s in step.spans] == [
        ("GPU", "attention", 0.0, 2.0),
        ("GPU", "send", 2.0, 3.0),
        ("CPU", "experts", 3.0, 9.0),
        ("GPU", "shared", 3.0, 4.0),
        ("GPU", "wait", 4.0, 9.0),
        ("GPU", "fetch", 9.0, 10.0),
    ]


def test_a_layer_on_the_gpu_hands_nothing_over():
    step = simulate([Layer(1.0, 2.0, 5.0, 5.0)])
    assert step.step_s == 3.0
