"""Gradients of factors through published weights: the loss of a text changes along the gradient as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktcli.main import main
from ktcli.native import Pool
from ktcli.text.passage import read_passage, read_with
from ktcli.training.lora import LoraSettings
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.pack import Pack

pytestmark = pytest.mark.published
TEXT = (
    "The capital of France is Paris. It lies on the Seine, and two million people live there.\n" * 3
)
STEP = 3e-3  # to both sides: the loss changes by 5e-3 or more, of which f32 rounds away 1e-7


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_loss_changes_as_the_gradient_says(
    name: str,
    request: pytest.FixtureRequest,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KT_HOME", str(home))
    path, pack, text = request.getfixturevalue(name), tmp_path / "pack", tmp_path / "text.txt"
    text.write_text(TEXT)
    assert main(["convert", str(path), "--out", str(pack)]) == 0
    reading = read_with(pack, read_passage(text), 64)
    ids = [[*([] if reading.begin is None else [reading.begin]), *reading.ids]]
    model = TrainableModel.open(
        Pack.open(pack), Pool(2), LoraSettings(4, 8.0), TrainingOptions(128, exact=True)
    )
    generator = torch.Generator().manual_seed(1)
    for each in model.factors.values():
        a, b = each.values
        each.fill(a, 0.02 * torch.randn(b.shape, generator=generator))
    masks = [[True] * len(ids[0])]
    model.loss_and_gradients(ids, masks)
    values = {name: each.values for name, each in model.factors.items()}
    gradients = {name: each.gradients for name, each in model.factors.items()}
    length = sum(float(g.double().square().sum()) for both in gradients.values() for g in both)
    length **= 0.5

    def loss_at(step: float) -> float:
        for name, each in model.factors.items():
            moves = zip(values[name], gradients[name], strict=True)
            each.fill(*(value + step / length * move for value, move in moves))
        return model.loss(ids, masks)

    assert (loss_at(STEP) - loss_at(-STEP)) / (2 * STEP) == pytest.approx(length, rel=1e-3)
