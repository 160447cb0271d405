"""How long a conversion is said to take, with a calibration and without."""

from __future__ import annotations

import pytest
from weights.fake_checkpoint import QWEN3

from ktcli.measure import calibration_time as under_test
from ktcli.measure.calibration_time import ConversionTime, estimate
from ktcli.models import build
from ktcli.native import Format, Pool
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe

PEAK = 1e12


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool that computes at PEAK, and encodes 10^8 numbers per second, of 8 bits 10^9; int6 half as many with
    importance."""

    def encode_s(fmt: Format, pool: Pool, weighted: bool) -> float:
        as_ever = 1e-9 if fmt.name.startswith("int8") else 1e-8
        return 2 * as_ever if weighted and fmt.name == "int6" else as_ever

    monkeypatch.setattr(under_test, "_encode_s", encode_s)
    monkeypatch.setattr(Pool, "ceiling", lambda *_: PEAK)
    return Pool(1)


def test_a_sparse_model_is_calibrated_and_a_dense_one_is_not(pool: Pool) -> None:
    """Of as many numbers, each token is multiplied with few or with all."""
    profile = catalog.find("qwen3-30b-a3b")
    assert profile is not None
    model = build(profile.config)
    recipe = Recipe.named("int4", "int4")
    found = estimate(model, recipe, 16_384, pool, 1)
    assert found.convert_s == pytest.approx(30.2e9 * 1e-8, rel=0.02)
    # 3.0e9 numbers per token without the head
    assert found.calibrate_s == pytest.approx(
        29.9e9 * 1e-9 + 2 * 16_384 * 3.0e9 / 0.45 / PEAK, rel=0.25
    )
    assert found.is_short
    twice = estimate(model, recipe, 16_384, pool, 2)
    assert twice.convert_s == pytest.approx(found.convert_s / 2)
    assert found.calibrate_s / 2 < twice.calibrate_s < found.calibrate_s
    dense = build({**profile.config, "num_experts": 8, "moe_intermediate_size": 768 * 16})
    same = estimate(dense, recipe, 16_384, pool, 1)
    assert same.convert_s == pytest.approx(found.convert_s, rel=0.01)
    assert not same.is_short


def test_small_models_are_not_calibrated_by_themselves(pool: Pool) -> None:
    assert not estimate(build(QWEN3), Recipe.named("int4", "int4"), 16_384, pool, 1).is_short


def test_encoding_with_importance_counts(pool: Pool) -> None:
    model = build(QWEN3)
    known, slower = (
        estimate(model, Recipe.named(name, name), 256, pool, 2) for name in ("int4", "int6")
    )
    assert slower.convert_s == known.convert_s
    assert slower.calibrate_s == pytest.approx(known.calibrate_s + known.convert_s)


def test_twice_the_conversion_is_the_limit() -> None:
    assert ConversionTime(1, 1.99).is_short and not ConversionTime(1, 2).is_short


def test_encoding_is_measured() -> None:
    pool, model = Pool(1), build(QWEN3)
    found = estimate(model, Recipe.named("int4", "int8"), 256, pool, 1)
    assert 0 < found.convert_s < 1 and 0 < found.calibrate_s < 10
