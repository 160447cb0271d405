"""Long prompts: both ways counted by hand, and the threshold between them."""

from dataclasses import replace

import numpy as np
import pytest
from shapes import RATES, shape

from ktcli.ops.part import ModelPart
from ktcli.planner import device_cost, experts
from ktcli.planner.cost import READ_SHARE, STEP_S, step_seconds
from ktcli.planner.device_cost import READ_SHARE as DEVICE_SHARE
from ktcli.planner.device_cost import DeviceRates, Hybrid
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.prefill import GRAIN, NEVER, Prefill
from ktcli.planner.spec import StepShape, step_work, weight_bytes
from ktcli.planner.stack import stack_of
from ktcli.weights.recipe import Recipe, stored_bytes

MODEL = shape("qwen3-30b-a3b")
STACK = stack_of(MODEL, Recipe())
DEVICE = DeviceRates(read_bps=1e12, bf16_ops=1e14, copy_bps=15e9, measured=True, basis="made up")


def prefill(
    per_layer: int = 0, device: DeviceRates = DEVICE, chunk: int = 4096, buffer: int = 128
) -> Prefill:
    mask = experts.uniform(per_layer, STACK.room(0))
    hits = experts.hits(mask, STACK.top_k)
    hybrid = Hybrid(STACK, RATES, device, hits, tuple(mask.sum(axis=1).tolist()))
    return Prefill(hybrid, chunk, buffer)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "deepseek-v3.2"])
@pytest.mark.parametrize("formats", [("int4", "int8"), ("bf16", "bf16")])
def test_the_layers_add_up_to_the_model(name: str, formats: tuple[str, str]):
    model, recipe = shape(name), Recipe.named(*formats)
    stack = stack_of(model, recipe)
    table = next(t for t in model.tensors if t.role.value == "table")
    routed = float(stack.expert.size_bytes.sum() * stack.experts)
    # Routers and what weighs index keys are bf16 in a pack, f32 on a GPU.
    kept = [t for t in model.tensors if t.part in (ModelPart.ROUTER, ModelPart.INDEXER)]
    kept_bytes = sum(stored_bytes(t, recipe) for t in kept)
    stored = (
        int(stack_of(model, recipe).near_bytes.sum()) - kept_bytes + routed + 2 * table.elements
    )
    assert stored == weight_bytes(model, recipe)
    step = {work.part: work for work in step_work(model, recipe, StepShape(1, 9999))}
    ops = stack.before.ops + stack.beside.ops + stack.top_k * stack.expert.ops
    cache = step.pop(ModelPart.CACHE)
    assert float(ops.sum()) + stack.head.ops == sum(work.ops for work in step.values())
    size, ops = stack.cache_work(9999, 1)
    assert cache.read_bytes == size * stack.layers
    assert cache.ops == ops * stack.layers


def test_experts_on_the_gpu_are_read_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels decode them where they are used: nobody writes them down as bf16."""
    monkeypatch.setattr(device_cost, "TILE_OPS", 1e30)
    tensor_cores = DeviceRates(1e12, 1e30, 15e9, True, "")
    hybrid = prefill(STACK.experts, tensor_cores).hybrid
    every = hybrid.by_layer((STACK.experts,) * len(STACK.moe))
    found = hybrid.experts_chunk_s(1 << 20, hybrid.k_gpu, every)
    np.testing.assert_allclose(found, every * STACK.expert.size_bytes / (1e12 * DEVICE_SHARE))


def test_an_infinitely_fast_gpu_leaves_the_cpus_own_time():
    """Experts of a chunk cost what the plan of the CPU alone counts for them."""
    fast = DeviceRates(1e30, 1e30, 1e30, True, "")
    for tokens in (1, 64, 512):
        works = [
            w for w in step_work(MODEL, Recipe(), StepShape(tokens)) if w.part is ModelPart.EXPERTS
        ]
        alone = step_seconds(works, 0, RATES, tokens) - STEP_S
        counted = prefill(0, fast).cpu_experts_s(tokens)
        assert counted == pytest.approx(alone, rel=1e-6)
        assert counted < prefill(0, fast).on_cpu_s(tokens) < counted + 48 * 200e-6


def test_a_slow_link_is_all_there_is_to_a_pass():
    slow = replace(DEVICE, copy_bps=1e9)
    copied = STACK.experts * float(STACK.expert.size_bytes.sum())
    passed = prefill(0, slow).streamed_s(GRAIN)
    assert passed == pytest.approx(copied / 1e9, rel=0.03)  # and the first buffer, before any work
    half = prefill(64, slow).streamed_s(GRAIN)
    assert half == pytest.approx(passed / 2, rel=0.05)


def test_copies_pass_main_memory_three_times():
    fast = replace(DEVICE, copy_bps=1e12)
    assert prefill(0, fast).copy_bps == RATES.read_bps / 3
    assert RATES.read_bps / 3 < RATES.read_bps * READ_SHARE


@pytest.mark.parametrize("per_layer", [0, 30, 100])
@pytest.mark.parametrize("copy_bps", [4e9, 12e9, 25e9, 50e9])
def test_the_threshold_is_the_least_that_pays(per_layer: int, copy_bps: float):
    made = prefill(per_layer, replace(DEVICE, copy_bps=copy_bps))
    paying = [
        n for n in range(GRAIN, made.chunk + 1, GRAIN) if made.streamed_s(n) < made.on_cpu_s(n)
    ]
    expected = min(paying, default=NEVER)
    assert made.threshold() == expected
    assert expected == NEVER or paying == list(range(expected, made.chunk + 1, GRAIN))


def test_a_faster_link_streams_earlier_and_no_buffer_never():
    rates = (3e9, 6e9, 12e9, 16e9)
    found = [prefill(0, replace(DEVICE, copy_bps=rate)).threshold() for rate in rates]
    assert found == sorted(found, reverse=True)
    assert prefill(buffer=0).threshold() == NEVER


def test_a_session_takes_the_faster_way_chunk_by_chunk():
    made = prefill()
    threshold = made.threshold()
    assert GRAIN < threshold < 4096
    for tokens in (1, threshold - GRAIN, threshold, 4096, 4096 + threshold - GRAIN, 9000):
        taken = made.seconds(tokens, threshold)
        assert taken <= 1.02 * min(made.on_cpu_s(tokens), made.streamed_s(tokens))
    assert made.seconds(4096, NEVER) == pytest.approx(made.on_cpu_s(4096))
    assert made.seconds(4096, 0) == pytest.approx(made.streamed_s(4096))


def test_chunks_grow_where_no_expert_is_on_the_cpu():
    assert prefill().plain_chunk == PREFILL_CHUNK
    assert prefill(128).plain_chunk == 4096


def test_more_tokens_are_never_faster():
    made = prefill(20)
    times = [
        [way(n) for n in (64, 128, 512, 513, 4096, 5000)]
        for way in (made.on_cpu_s, made.streamed_s)
    ]
    assert np.all(np.diff(times, axis=1) >= 0)
