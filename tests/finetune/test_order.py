"""Which samples a step takes, and at which learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktcli.finetune.log import has_overfitted
from ktcli.finetune.order import RateSchedule, StepOrder, split, units_of
from ktcli.finetune.settings import FinetuneSettings

SETTINGS = FinetuneSettings(num_train_epochs=2.5)


def test_each_epoch_has_each_sample_once_in_another_order() -> None:
    order = StepOrder(tuple((n,) for n in range(10)), 4, seed=1)
    assert order.steps_per_epoch == 3 and order.steps(SETTINGS) == 8
    epochs = [[n for step in range(at, at + 3) for n in order.samples(step)] for at in (0, 3, 6)]
    assert [sorted(each) for each in epochs] == [list(range(10))] * 3
    assert len({tuple(each) for each in epochs}) == 3
    assert [len(order.samples(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    other = StepOrder(order.units, 4, seed=2)
    assert [other.samples(step) for step in range(3)] != [order.samples(step) for step in range(3)]


def test_max_steps_come_before_epochs() -> None:
    order = StepOrder(((0,), (1,)), 8, seed=1)
    assert order.steps(replace(SETTINGS, max_steps=100)) == 100
    assert order.steps(replace(SETTINGS, num_train_epochs=0.1)) == 1


@pytest.mark.parametrize(
    ("lengths", "units"),
    [
        ([3, 3, 3, 9], ((0, 1, 2), (3,))),
        ([10, 1, 9, 1], ((0,), (1, 2), (3,))),
        ([5, 6, 5, 5], ((0,), (1,), (2, 3))),
    ],
)
def test_packed_documents_fill_the_cutoff(
    lengths: list[int], units: tuple[tuple[int, ...], ...]
) -> None:
    assert units_of(lengths, range(4), 10, packs=True) == units
    assert units_of(lengths, [2, 3], 10, packs=False) == ((2,), (3,))


@pytest.mark.parametrize(
    ("val_size", "held"), [(0.0, 0), (0.1, 2), (0.01, 1), (3, 3), (1, 1), (0.5, 10), (50, 20)]
)
def test_a_share_or_a_number_is_held_out(val_size: float, held: int) -> None:
    trained, out = split(20, val_size, seed=7)
    assert len(out) == held and sorted([*trained, *out]) == list(range(20))
    assert split(20, val_size, seed=7) == (trained, out)


def test_rates_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    for kind in ("constant", "constant_with_warmup", "linear", "cosine"):
        for ratio, steps in ((0.0, 7), (0.1, 25), (0.5, 8)):
            settings = FinetuneSettings(lr_scheduler_type=kind, warmup_ratio=ratio)
            ours = RateSchedule.of(settings, steps)
            adam = torch.optim.AdamW([torch.zeros(1)], lr=1.0)
            judge = get_scheduler(kind, adam, -(-int(ratio * steps * 100) // 100), steps)
            for step in range(steps):
                assert ours.share(step) == pytest.approx(judge.get_last_lr()[0], abs=1e-12)
                adam.step()
                judge.step()


@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_a_share_of_warm_up_leaves_a_step_that_trains(kind: str) -> None:
    settings = FinetuneSettings(lr_scheduler_type=kind)
    assert RateSchedule.of(settings, 1).share(0) == 1.0
    assert [RateSchedule.of(settings, 2).share(step) for step in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([3, 2, 1], False),
        ([1, 2, 3], False),
        ([1, 2, 3, 4], True),
        ([1, 2, 3, 4, 3], False),
        ([5, 1, 2, 2, 3], False),
        ([9, 1, 2, 3, 4], True),
    ],
)
def test_three_rises_are_overfitting(losses: list[float], said: bool) -> None:
    assert has_overfitted([(step, loss) for step, loss in enumerate(losses)]) is said
