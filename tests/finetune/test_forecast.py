"""The predicted time of a step: that of measured steps, and it moves with what a step has as they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktcli.finetune.forecast import Forecaster, StepForecast, StepLoad
from ktcli.models import build, cut
from ktcli.planner.cost import Rates
from ktcli.store.catalog import find
from ktcli.training.lora import LoraSettings, described_factors
from ktcli.weights.recipe import Recipe

# What one core of an Intel Xeon (Emerald Rapids, avx512) does in a second of its own, measured 2026-11-28.
CORE = Rates(14e9, 690e9, 164e9, True, "measured")
ALL, ATTENTION = ("all",), ("q_proj", "k_proj", "v_proj", "o_proj")
WITHIN = 0.15


def forecaster(
    name: str,
    layers: int,
    formats: tuple[str, str] = ("int4", "int8"),
    targets: tuple[str, ...] = ALL,
    rates: Rates = CORE,
    isa: str = "avx512",
) -> Forecaster:
    entry = find(name)
    assert entry is not None
    model = build(cut(entry.config, layers) if layers else entry.config)
    factors = described_factors(model, LoraSettings(8, 16, targets))
    return Forecaster(model, Recipe.named(*formats), rates, isa, factors)


def times(
    f: Forecaster, documents: int, length: int, trained: int, retain: bool = False
) -> StepForecast:
    return f.step(StepLoad(((length, documents),), trained), retain=retain)


# Layers, documents, their tokens, trained tokens, formats, targets; seconds of processor time of a step with AdamW, one
# thread: the better of two.
MEASURED = [
    ("qwen3-30b-a3b", 1, (2, 512, 2), ("int4", "int8"), ALL, 3.61),
    ("qwen3-30b-a3b", 1, (1, 256, 1), ("int4", "int8"), ALL, 1.11),
    ("qwen3-30b-a3b", 1, (1, 512, 511), ("int4", "int8"), ALL, 7.76),
    ("qwen3-30b-a3b", 1, (2, 512, 2), ("bf16", "bf16"), ALL, 5.34),
    ("qwen3-30b-a3b", 2, (1, 512, 1), ("int4", "int8"), ATTENTION, 3.42),
    ("qwen3-4b", 2, (1, 512, 1), ("int4", "int8"), ALL, 6.02),
    ("deepseek-v2-lite", 2, (1, 512, 1), ("int4", "int8"), ALL, 4.43),
    ("kt-mini", 0, (4, 64, 252), ("int4", "int8"), ALL, 0.204),
    ("kt-mini", 0, (4, 128, 508), ("int4", "int8"), ALL, 0.287),
    ("kt-mini", 0, (8, 128, 1016), ("int4", "int8"), ALL, 0.488),
]


@pytest.mark.parametrize(("name", "layers", "load", "formats", "targets", "seconds"), MEASURED)
def test_steps_take_as_long_as_measured(
    name: str,
    layers: int,
    load: tuple[int, int, int],
    formats: tuple[str, str],
    targets: tuple[str, ...],
    seconds: float,
) -> None:
    found = times(forecaster(name, layers, formats, targets), *load).step_s
    assert found == pytest.approx(seconds, rel=WITHIN)


def test_times_follow_what_a_step_has() -> None:
    f = forecaster("qwen3-30b-a3b", 2)
    usual = times(f, 4, 512, 1000)
    assert times(f, 8, 512, 1000).layers_s == pytest.approx(2 * usual.layers_s, rel=0.05)
    assert times(f, 8, 512, 1000).head_s == usual.head_s
    assert times(f, 2, 1024, 1000).layers_s > usual.layers_s  # attention
    assert times(f, 4, 512, 2000).head_s > 1.8 * usual.head_s
    assert times(f, 4, 512, 1000, retain=True).layers_s < usual.layers_s
    more = times(forecaster("qwen3-30b-a3b", 4), 4, 512, 1000)
    assert more.layers_s == pytest.approx(2 * usual.layers_s, rel=0.01)
    fewer = times(forecaster("qwen3-30b-a3b", 2, targets=ATTENTION), 4, 512, 1000)
    assert fewer.optimizer_s < 0.05 * usual.optimizer_s and fewer.layers_s < usual.layers_s
    assert f.evaluation_s(StepLoad(((512, 4),), 1000)) < 0.4 * usual.step_s


def test_a_machine_of_twice_the_rates_takes_half_the_time() -> None:
    """But for what torch's operations cost by themselves, and with tiles far less than that."""
    slow = times(forecaster("qwen3-30b-a3b", 2), 8, 512, 1000).step_s
    double = replace(CORE, read_bps=28e9, int8_ops=1380e9, bf16_ops=328e9)
    fast = times(forecaster("qwen3-30b-a3b", 2, rates=double), 8, 512, 1000).step_s
    assert fast == pytest.approx(slow / 2, rel=0.02)
    tiles = replace(double, int8_ops=11e12, bf16_ops=5.2e12, tiles=True)
    best = times(forecaster("qwen3-30b-a3b", 2, rates=tiles, isa="amx"), 8, 512, 1000).step_s
    assert 0.3 * fast < best < fast


def test_a_load_is_the_mean_of_its_steps() -> None:
    load = StepLoad.of([10, 20, 20, 30], 40, 4)
    assert (load.tokens, load.trained) == (20.0, 10.0)
    assert load.lengths == ((10, 0.25), (20, 0.5), (30, 0.25))
    assert load.shared(2).tokens == 10.0
