"""Plans with several GPUs: how layers are divided, which GPUs are used, and what they gain."""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import GIB, shape

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.machine import Gpu
from ktcli.hardware.profile import read_machine
from ktcli.planner.device import share_out
from ktcli.planner.device_cost import slowest
from ktcli.planner.host import Host, host_of
from ktcli.planner.lower import step_down
from ktcli.planner.placement import place
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.planner.segments import _BORDER, Devices
from ktcli.planner.spec import weight_bytes
from ktcli.planner.stack import split, stack_of
from ktcli.weights.recipe import Recipe

QWEN, LARGE = "qwen3-30b-a3b", "qwen3-235b-a22b"
TWO, EIGHT = "workstation-2x4090", "server-8xl20-1tb"
model = cache(shape)


@cache
def host(name: str) -> Host:
    return host_of(read_machine(Path(name)), torch=True)


def used(made: Plan) -> DevicePlan:
    assert made.device is not None, made.notes
    return made.device


def gpu(number: int, gib: float) -> Gpu:
    size = int(gib * GIB)
    return Gpu(number, "NVIDIA Test", size, size, link_bps=30e9, read_bps=9e11, bf16_ops=1e14)


# --- which GPUs -------------------------------------------------------------------------------------


def test_a_model_that_one_gpu_holds_lies_on_the_emptiest_and_the_others_are_named():
    made = place(model(QWEN), host(TWO), Request())
    assert [each.index for each in used(made).gpus] == [1]
    assert made.notes[0] == (
        "cuda:0 (NVIDIA GeForce RTX 4090, 24.0 GiB) stays unused, because the whole model is on other GPUs"
    )
    first = place(model(QWEN), host(TWO), Request(device="cuda:0"))
    assert [each.index for each in used(first).gpus] == [0]
    many = place(model(QWEN), host(EIGHT), Request())
    assert "cuda:1-7 (NVIDIA L20, 45.0 GiB) stay unused" in many.notes[0]


@pytest.mark.parametrize(
    ("where", "name"), [(TWO, LARGE), (EIGHT, "deepseek-v3"), (EIGHT, "kimi-k2")]
)
def test_several_gpus_hold_more_experts_and_are_faster(where: str, name: str):
    one, all_of_them = (
        place(model(name), host(where), Request(gpus=gpus)) for gpus in ((0,), None)
    )
    assert len(used(all_of_them).gpus) > 1 == len(used(one).gpus)
    assert used(all_of_them).hit_rate > 2 * used(one).hit_rate
    assert all_of_them.speed.decode > 1.15 * one.speed.decode
    assert all_of_them.need_bytes < one.need_bytes
    assert [(each.option, each.what) for each in one.costs] == [("--gpus 0", "decode")]


def test_they_take_layers_in_the_order_in_which_they_are_named():
    for numbers in ((0, 1), (1, 0)):
        made = used(place(model(LARGE), host(TWO), Request(gpus=numbers)))
        assert tuple(each.index for each in made.gpus) == numbers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": (0, 7)}, "there is no GPU cuda:7"),
        ({"gpus": (0,), "device": "cuda:1"}, "cuda:1 is not one of the allowed GPUs: 0"),
    ],
)
def test_what_makes_no_sense(change: dict, words: str):
    with pytest.raises(UsageError, match=words):
        place(model(QWEN), host(TWO), Request(**change))


def test_no_more_experts_than_make_a_step_faster():
    """Where the CPU reads a third as fast as a GPU, it would wait for it; all of them are another matter."""
    made = used(place(model("deepseek-v3"), host(EIGHT), Request()))
    assert any("more experts on the GPU would be slower" in reason for reason in made.reasons)
    more = place(model("deepseek-v3"), host(EIGHT), Request(gpu_experts="uniform"))
    assert used(more).hit_rate > made.hit_rate
    assert more.speed.decode < place(model("deepseek-v3"), host(EIGHT), Request()).speed.decode
    heat = np.random.default_rng(3).zipf(1.5, (58, 256)).clip(max=10_000)
    hot = used(place(model("deepseek-v3"), host(EIGHT), Request(heat=heat)))
    assert hot.rule == "hot" and hot.hit_rate == pytest.approx(made.hit_rate, abs=0.05)
    assert sum(hot.n_experts) < sum(made.n_experts)


# --- what lies where --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"), [(TWO, LARGE), (EIGHT, "kimi-k2"), (TWO, "gpt-oss-120b")]
)
def test_both_memories_hold_the_model_once(where: str, name: str):
    made = place(model(name), host(where), Request())
    device = used(made)
    layers = [layer for each in device.segments for layer in each.layers]
    assert layers == list(range(model(name).spec.layers))
    assert all(each.need.total <= each.budget_bytes for each in device.segments)
    there = [line for line in made.lines if line.where == "GPU"]
    assert sum(line.size_bytes for line in there) == device.need.total
    _, share = split(model(name), device.mask)
    stored = stack_of(model(name), Recipe()).near_bytes.sum() + device.need.experts
    assert device.need.weights + device.need.experts == int(stored)
    assert weight_bytes(share, Recipe()) <= stored


def test_a_layer_that_follows_anothers_choice_is_not_parted_from_it():
    borders = model("glm-5").borders
    made = used(place(model("glm-5"), host(EIGHT), Request()))
    assert set(made.borders) <= set(borders)


def test_gpus_of_several_kinds_are_planned_as_the_slowest():
    fast, slow = gpu(0, 24), replace(gpu(1, 24), name="NVIDIA Slow", read_bps=3e11)
    both = replace(host(TWO), gpus=(fast, slow))
    made = used(place(model(LARGE), both, Request(gpus=(0, 1))))
    assert made.rates.read_bps == 3e11 and made.names == "NVIDIA Test, NVIDIA Slow"
    assert slowest([made.rates]) == made.rates


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(3.0, 14.0), min_size=1, max_size=3), st.sampled_from([512, 8192, 32768]))
def test_no_other_division_leaves_fewer_experts_out(sizes: list[float], context: int):
    """Against all divisions of a model of six layers."""
    small = shape(QWEN, num_hidden_layers=6)
    stack = stack_of(small, Recipe.named("bf16", "bf16"))
    gpus = tuple(gpu(i, gib) for i, gib in enumerate(sizes))
    devices = Devices(small.spec, small.borders, stack, gpus)
    found = [(each.gpu, each.layers) for each in devices.budgets(context, streams=False)]
    assert [layer for _, layers in found for layer in layers] == list(range(6))

    def lacking(division: list[tuple[Gpu, range]]) -> float:
        total = 0.0
        for each, layers in division:
            budget = share_out(devices.sizes(layers), each, context, streams=False)
            wanted = stack.room(0, layers).all_bytes
            if not budget.fits:
                return float("inf")
            share = min(1.0, budget.experts_bytes / wanted)
            total += len(layers) * (1 - share) ** 2 + _BORDER
        return total

    every = [
        list(zip(some, (range(a, b) for a, b in pairwise((0, *cuts, 6))), strict=True))
        for n in range(1, len(gpus) + 1)
        for some in combinations(gpus, n)
        for cuts in combinations(small.borders, n - 1)
    ]
    best = min(map(lacking, every))
    fits = all(each.fits for each in devices.budgets(context, streams=False))
    assert fits == (best < float("inf"))
    if fits:
        assert lacking(found) <= best * 1.001 + 1e-9


# --- when memory is short ---------------------------------------------------------------------------


def test_what_fits_none_of_them_says_which_layers():
    small = replace(host(TWO), gpus=(gpu(0, 3), gpu(1, 3)))
    with pytest.raises(
        NotEnoughMemory, match=r"everything but the experts of layers \d+-\d+"
    ) as caught:
        place(model("deepseek-v3"), small, Request(device="cuda"))
    assert "--device cpu" in caught.value.hint


def test_a_context_too_long_for_one_gpu_fits_two():
    long = 32768
    one, two = (replace(host(TWO), gpus=tuple(gpu(i, 4.5) for i in range(n))) for n in (1, 2))
    with pytest.raises(NotEnoughMemory):
        place(model(QWEN), one, Request(device="cuda", context=long))
    assert len(used(place(model(QWEN), two, Request(device="cuda", context=long))).gpus) == 2


def test_a_limit_holds_for_its_gpu():
    limits = {1: 10 * GIB}
    made = used(place(model(LARGE), host(TWO), Request(limits=limits)))
    need = {each.gpu.index: each.need.total for each in made.segments}
    assert need[1] <= 10 * GIB < need[0]


@pytest.mark.thorough
def test_every_step_down_takes_less_and_the_last_is_the_cpu():
    request = Request(device="cuda")
    made, seen = place(model(LARGE), host(TWO), request), 0
    while (lower := step_down(model(LARGE), request, made)) is not None:
        before, request = made, lower.request
        assert lower.sentence.startswith("2 x NVIDIA") or len(used(made).gpus) == 1
        made = place(model(LARGE), host(TWO), request)
        seen += 1
        if made.device is None:
            break
        assert made.device.need.total < used(before).need.total
        assert seen < 60
    assert made.device is None and seen > 3
