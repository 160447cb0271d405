"""Forecasts: the plan's own arithmetic, and which experts Fiddler computes on the CPU."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from shapes import shape

from ktcli.hardware.profile import read_machine
from ktcli.models import Model
from ktcli.planner.forecast import Forecast, forecast
from ktcli.planner.host import host_of
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request, early_position

CASES = [
    ("laptop-8gb-gpu", "qwen3-30b-a3b"),
    ("workstation-4090-512gb", "deepseek-v3"),
    ("cloud-h200-128gb", "deepseek-v2-lite"),
]


@cache
def made(machine: str, name: str) -> tuple[Model, Plan, Forecast]:
    model = shape(name)
    plan = place(model, host_of(read_machine(Path(machine)), torch=True), Request())
    assert plan.device is not None
    return model, plan, forecast(model, plan, plan.device)


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_it_says_what_the_plan_says(machine: str, name: str):
    _, plan, found = made(machine, name)
    assert plan.device is not None
    early = early_position(plan.context)
    assert 1 / found.decode_s(early, plan.device.depth) == pytest.approx(plan.speed.decode)
    tokens = min(plan.device.chunk, plan.context)
    seconds = found.prefill_s(tokens, plan.device.prefill_threshold)
    assert tokens / seconds == pytest.approx(plan.speed.prefill)


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_the_cpu_takes_experts_with_few_tokens(machine: str, name: str):
    """One token: reading an expert where it lies beats copying it. Thousands: arithmetic decides."""
    *_, found = made(machine, name)
    sides = [found.is_faster_on_cpu(n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 1024, 65536)]
    assert sides[0] and not sides[-1]
    assert sides == sorted(sides, reverse=True)


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_a_prompt_in_two_parts_takes_as_long_as_in_one(machine: str, name: str):
    _, plan, found = made(machine, name)
    assert plan.device is not None
    threshold = plan.device.prefill_threshold
    first, second = found.prefill_s(4096, threshold), found.prefill_s(2048, threshold, 4096)
    assert first + second == pytest.approx(found.prefill_s(6144, threshold))


def test_choosing_is_never_slower_than_fetching_all():
    *_, found = made("laptop-8gb-gpu", "qwen3-30b-a3b")
    for n in (1, 16, 512):
        chosen = found.on_demand_s(n, 100, may_compute=True)
        assert chosen <= found.on_demand_s(n, 100, may_compute=False)


def test_with_everything_on_the_gpu_nothing_is_fetched():
    _, plan, found = made("cloud-h200-128gb", "deepseek-v2-lite")
    assert plan.device is not None and np.all(plan.device.mask)
    slow = replace(found.hybrid, device=replace(found.hybrid.device, copy_bps=1.0))
    there = replace(found, prefill=replace(found.prefill, hybrid=slow))
    head = slow.head_s() - found.hybrid.head_s()
    one, other = (each.on_demand_s(1, 0, may_compute=False) for each in (there, found))
    assert one - head == pytest.approx(other)
