"""Dropout: as many elements as asked for, the same whenever a step is computed, none outside of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from finetune.runs import SHORT, opened, samples, with_steps

from ktcli.training.dropout import Dropout
from ktcli.weights.pack import Pack


def thinned(rate: float, seed: int, step: int, name: str) -> torch.Tensor:
    dropout = Dropout(rate, seed)
    with dropout.during(step):
        return dropout.thinned(name, torch.ones(999, 101)) * dropout.scale


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_the_mean_stays(rate: float) -> None:
    """Within five standard deviations; and no row or column is dropped more often than others."""
    found = thinned(rate, 1, 2, "q_proj")
    share = float((found == 0).float().mean())
    assert abs(share - rate) < 5 * (rate * (1 - rate) / found.numel()) ** 0.5 + 1e-5
    assert float(found.mean()) == pytest.approx(
        1.0, abs=5 * (rate / (1 - rate) / found.numel()) ** 0.5
    )
    for axis in (0, 1):
        spread = (found == 0).float().mean(axis).std() * found.shape[axis] ** 0.5
        assert 0.8 < float(spread) / (rate * (1 - rate)) ** 0.5 < 1.2


def test_masks_follow_from_seed_step_and_name() -> None:
    first = thinned(0.3, 1, 2, "q_proj")
    assert torch.equal(first, thinned(0.3, 1, 2, "q_proj"))
    for other in (
        thinned(0.3, 2, 2, "q_proj"),
        thinned(0.3, 1, 3, "q_proj"),
        thinned(0.3, 1, 2, "k_proj"),
    ):
        assert 0.35 < float((first != other).float().mean()) < 0.49  # 2 * 0.3 * 0.7


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_a_step_drops_and_nothing_else_does(name: str, pack_of: Callable[..., Pack]) -> None:
    """Its gradients have the same bits whenever it is computed, also if the layers' graphs are retained."""
    settings = with_steps(SHORT, 1, lora_dropout=0.2)
    trained, plain = (opened(pack_of(name), each) for each in (settings, SHORT))
    for both in zip(trained.factors.values(), plain.factors.values(), strict=True):
        a, b = both[0].values
        for each in both:
            each.fill(a, torch.full_like(b, 0.01))
    read = samples(3).samples
    given = [each.ids for each in read], [each.trained for each in read]
    found = []
    for number in (4, 5, 4):
        loss = trained.loss_and_gradients(*given, number).loss
        found.append((loss, [g for each in trained.factors.values() for g in each.gradients]))
    assert found[0][0] == found[2][0] != found[1][0]
    assert all(map(torch.equal, found[0][1], found[2][1]))
    assert not all(map(torch.equal, found[0][1], found[1][1]))
    assert trained.loss(*given) == plain.loss(*given) != found[0][0]
    trained.options = type(trained.options)(64, exact=True, retain=True)
    assert trained.loss_and_gradients(*given, 4).loss == found[0][0]
    again = [g for each in trained.factors.values() for g in each.gradients]
    assert all(map(torch.equal, found[0][1], again))
