"""The judge of the whole model: the loss of kt-mini changes along a direction as its gradient says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from convert import convert_checkpoint
from tokenizers import Tokenizer
from training.judge import randomise
from training.opened import POOL, every_target

import ktcli
from ktcli.models import build
from ktcli.training.lora import LoraSettings
from ktcli.training.loss import mean_loss
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.pack import Pack

MINI = Path(ktcli.__file__).parents[1] / "profiles" / "kt-mini"
TEXTS = (
    "kt runs mixture-of-experts models on one machine with little memory.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
)
# How far along, to both sides: the loss changes by 1e-2 and 6e-4, of which f32 rounds away 1e-8 or so.
STEPS = {"the gradient": 1e-2, "a random direction": 3e-2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainableModel:
    out = tmp_path_factory.mktemp("mini") / "pack"
    pack = Pack.open(convert_checkpoint(MINI, out, experts="int4", dense="int8"))
    settings = LoraSettings(2, 4.0, every_target(build(pack.config)))
    model = TrainableModel.open(pack, POOL, settings, TrainingOptions(64, exact=True))
    randomise(model.factors, 1)
    return model


@pytest.mark.skipif(not MINI.is_dir(), reason="kt-mini is not part of an installed package")
@pytest.mark.parametrize("along", STEPS)
def test_the_loss_changes_as_the_gradient_says(along: str, trained: TrainableModel) -> None:
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    masks = [[True] * len(ids) for ids in texts]
    trained.loss_and_gradients(texts, masks)
    gradients = {name: each.gradients for name, each in trained.factors.items()}
    values = {name: each.values for name, each in trained.factors.items()}
    generator = torch.Generator().manual_seed(4)
    direction = {
        name: [
            each if along == "the gradient" else torch.randn(each.shape, generator=generator) / 30
            for each in both
        ]
        for name, both in gradients.items()
    }
    length = sum(float(each.square().sum()) for both in direction.values() for each in both) ** 0.5
    expected = sum(
        float((gradient.double() * each).sum()) / length
        for name, both in gradients.items()
        for gradient, each in zip(both, direction[name], strict=True)
    )

    packed = trained._packed(texts, masks)
    passed: list[list[Any]] = []
    trained._forward(packed, passed)

    @torch.no_grad()
    def loss_at(step: float) -> float:
        """The loss this far along the direction, with the experts that were chosen where it begins."""
        for name, each in trained.factors.items():
            moves = zip(values[name], direction[name], strict=True)
            each.fill(*(value + step / length * move for value, move in moves))
        x = passed[0][0].x
        for layer, (each,) in enumerate(passed):  # all documents are one group
            backend = trained._backend(each.group, x, layer, each.chosen)
            x = trained.model.layer(backend, x, layer)
        return mean_loss(trained._head, x, packed, trained.model.spec.vocab)

    step = STEPS[along]
    found = (loss_at(step) - loss_at(-step)) / (2 * step)
    loss_at(0.0)
    assert found == pytest.approx(expected, rel=1e-3)
