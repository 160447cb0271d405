"""`--experts auto`: the most precise format that fits, down to the smallest; 4 bits of a checkpoint stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import host, shape

from ktcli.planner.choice import choose_experts
from ktcli.planner.placement import place
from ktcli.planner.plan import Request
from ktcli.weights.formats import FORMATS
from ktcli.weights.recipe import Recipe, automatic

MODEL, LARGE = shape("qwen3-30b-a3b"), host(4096)


@pytest.mark.parametrize("name", automatic())
def test_the_most_precise_that_fits(name: str) -> None:
    """With just the memory for a format it is chosen, with more never one of fewer bits."""
    need = place(MODEL, LARGE, Request(Recipe.named(name), 4096)).need_bytes
    found = choose_experts(MODEL, replace(LARGE, available_bytes=need), Request(context=4096))
    assert found.experts == name and "most precise that fits" in found.reason


def test_nothing_fits() -> None:
    found = choose_experts(MODEL, replace(LARGE, available_bytes=1 << 30), Request(context=4096))
    assert found.experts == automatic()[-1] and "too large" in found.reason


def test_what_is_in_4_bits_stays_exact() -> None:
    for name, stays in (("mxfp4", True), ("int4-g32", True), ("fp8", False), ("bf16", False)):
        found = choose_experts(MODEL, LARGE, Request(), FORMATS[name])
        assert (found.experts == name) == stays
