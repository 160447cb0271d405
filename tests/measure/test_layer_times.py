"""Times of a layer as the CPU sees them: of every placement that has two layers in a row on the CPU."""

from __future__ import annotations

import math

import pytest
from hybrid import Made

from ktcli.measure.layer_times import layer_times


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.convert(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("mask", ["none", "some", "front"])
def test_times_are_seen_and_leave_no_trace(made: Made, mask: str) -> None:
    engine = made.engine(made.placed(mask))
    times = layer_times(engine)
    several = int((~made.mask(mask).all(axis=1)).sum()) > 1
    assert (times is not None) == several
    if times is not None:
        assert times.shared_s == 0.0  # nobody sees it from there
        assert all(math.isfinite(t) and t > 0 for t in (times.expert_s, times.device_s))
    assert engine.chosen().sum() == 0
    engine.session()  # the pages are there again


def test_nothing_to_see_without_experts_on_the_cpu(made: Made) -> None:
    assert layer_times(made.engine(made.placed("all"))) is None
