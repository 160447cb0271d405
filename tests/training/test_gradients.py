"""Gradients of A, B and the residual equal those of torch's graph through transformers, in every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from convert import convert_checkpoint
from reference import CASES, Case
from training.judge import (
    JudgedStep,
    comparable,
    judge_in_doubles,
    judge_step,
    reference_model,
    relative,
    worst,
)
from training.opened import LENGTHS, documents, masks, opened

from ktcli.models import build
from ktcli.training.model import StepGradients, TrainableModel
from ktcli.training.recorded import missing_part
from ktcli.weights.pack import Pack

EXACT = 1e-5  # of a gradient's length; measured: at most 6.5e-6, which is the noise of f32


def trained(case: Case) -> bool:
    return missing_part(build(case.own_spelling())) == ""


def assert_as_close_as_f32(
    model: TrainableModel, found: StepGradients, wanted: JudgedStep, exact: JudgedStep
) -> None:
    """Where f32 itself is noisier than `EXACT`: ours is at most three times as far from f64 as transformers' f32 is."""
    noise = max(
        relative(one, other)
        for name, both in exact.gradients.items()
        for one, other in zip(wanted.gradients[name], both, strict=True)
    )
    noise = max(noise, relative(wanted.embedded, exact.embedded))
    assert noise > EXACT, "f32 is exact enough here, so kt's gradient is wrong"
    assert relative(found.embedded, exact.embedded) <= 3 * noise
    assert worst(model, exact)[0] <= 3 * noise, worst(model, exact)


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", [c for c in CASES if trained(c)], ids=lambda case: case.name)
def test_exact_gradients_are_those_of_transformers(
    case: Case, checkpoint_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(case)
    pack = convert_checkpoint(checkpoint, tmp_path / "pack", experts="bf16", dense="bf16")
    model, judge = opened(Pack.open(pack)), reference_model(case, checkpoint)
    factors = comparable(judge, model.factors)
    texts = documents(*LENGTHS)
    found = model.loss_and_gradients(texts, masks(texts))
    wanted = judge_step(judge, factors, texts, masks(texts))
    assert len(factors) >= 3
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    far = relative(found.embedded, wanted.embedded), *worst(model, wanted)
    if max(far[:2]) > EXACT:
        assert_as_close_as_f32(
            model, found, wanted, judge_in_doubles(judge, factors, texts, masks(texts))
        )
    for ours, theirs in zip(model.logits(texts), wanted.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.std()
