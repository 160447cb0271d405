"""`optim=adamw_bf16`: AdamW in f32 whose moments are kept in bf16, rounded at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from finetune.runs import SHORT, Seen, begun, opened, resumed, same_bits, values, with_steps

from ktcli.finetune.half_moments import HalfMoments, next_bits, rounded
from ktcli.finetune.settings import HALF_MOMENTS, FinetuneSettings
from ktcli.weights.pack import Pack

SETTINGS = FinetuneSettings(weight_decay=0.01, seed=3)
HALF = replace(SHORT, optim=HALF_MOMENTS)


def test_rounding_keeps_the_mean_and_what_bf16_has() -> None:
    """Numbers between two of bf16 become one of them, as often as they are near it."""
    numbers = np.random.SFC64(1)
    for value in (1.001, -3e-5, 1e-30, 0.0, 1.5):
        x = torch.full((1 << 16,), value)
        found = rounded(x, next_bits(numbers, x)).float()
        low, high = found.min(), found.max()
        assert low <= x[0] <= high and high - low <= abs(value) / 127
        assert found.double().mean() == pytest.approx(float(x[0]), rel=1e-4)
        assert value not in (0.0, 1.5) or (found == value).all()


def test_the_second_moment_becomes_smaller() -> None:
    """By 0.1 % in a step without a gradient, which is less than bf16 can tell."""
    x = torch.zeros(1 << 12)
    x.grad = torch.ones(1 << 12)
    half = HalfMoments({"x": x}, SETTINGS)
    half.step(1, {"x": 0.0})
    x.grad.zero_()
    for step in range(2, 402):
        half.step(step, {"x": 0.0})
    found = half.state["x.exp_avg_sq"].float()
    assert found.mean() == pytest.approx(1e-3 * 0.999**400, rel=5e-3)


def test_a_first_step_is_torchs_and_later_ones_are_near() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(5_000, generator=generator)
    own, theirs = start.clone(), start.clone().requires_grad_()
    half = HalfMoments({"x": own}, SETTINGS)
    s = SETTINGS
    adam = torch.optim.AdamW([theirs], 1e-2, s.betas, s.adam_epsilon, s.weight_decay)
    for step in range(1, 51):
        own.grad = torch.randn(5_000, generator=generator) + start
        theirs.grad = own.grad.clone()
        half.step(step, {"x": 1e-2})
        adam.step()
        if step == 1:
            assert torch.allclose(own, theirs, rtol=0, atol=1e-7)
    moved = (theirs.detach() - start).norm()
    assert (own - theirs.detach()).norm() <= 0.01 * moved


def test_a_run_goes_on_with_the_same_bits_and_learns_as_one_in_f32(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    """Its checkpoints are smaller, and a run with moments in f32 goes on from them, too."""
    pack, settings = pack_of("qwen3"), with_steps(HALF, 6)
    whole, seen = opened(pack, settings), Seen()
    begun(whole, settings, tmp_path / "whole").train(seen)
    first, before = opened(pack, settings), Seen()
    stopped = begun(first, settings, tmp_path / "parts").train(
        before, lambda: len(before.reports) == 3
    )
    second, after = opened(pack, settings), Seen()
    resumed(second, settings, tmp_path / "parts", stopped.checkpoint).train(after)
    assert [*before.losses, *after.losses] == list(seen.losses)
    assert same_bits(values(whole), values(second))
    usual, plain = opened(pack, with_steps(SHORT, 6)), Seen()
    begun(usual, with_steps(SHORT, 6), tmp_path / "usual").train(plain)
    assert seen.losses == pytest.approx(plain.losses, rel=1e-4)
    sizes = [
        (tmp_path / each / "checkpoint-6" / "optimizer.safetensors").stat().st_size
        for each in ("whole", "usual")
    ]
    assert sizes[0] < 0.55 * sizes[1]
    again = opened(pack, with_steps(SHORT, 6))
    resumed(again, with_steps(SHORT, 6), tmp_path / "parts", stopped.checkpoint).train(Seen())
