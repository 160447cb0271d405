"""Small runs: random samples, a random model of two layers, and whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktcli.finetune import checkpoint
from ktcli.finetune.checkpoint import RunIdentity
from ktcli.finetune.order import split
from ktcli.finetune.plan import TrainingSplit, lora_of, order_of
from ktcli.finetune.run import FinetuneRun, RunPlace, StepReport
from ktcli.finetune.settings import FinetuneSettings
from ktcli.finetune.trained import fill_factors
from ktcli.native import Pool
from ktcli.samples.sample import Sample, SampleSet
from ktcli.training.denselayers import TrainingDevice
from ktcli.training.model import TrainableModel, TrainingOptions
from ktcli.weights.pack import Pack

SHORT = FinetuneSettings(
    lora_rank=4, gradient_accumulation_steps=3, learning_rate=1e-3, save_steps=1000
)
IDENTITY = RunIdentity("d" * 64, "p" * 64, {"lora_rank": 4})


def samples(count: int, *, vocab: int = 99, seed: int = 3) -> SampleSet:
    """Random documents of 4 to 16 tokens, of which the second half is trained."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(draw.integers(4, 17))
        ids = tuple(draw.integers(0, vocab, length).tolist())
        trained = tuple(at >= length // 2 for at in range(length))
        made.append(Sample(ids, trained, f"random, line {number + 1}"))
    return SampleSet(tuple(made), (), "d" * 64)


def data_of(read: SampleSet, settings: FinetuneSettings) -> TrainingSplit:
    trained, held = split(len(read.samples), settings.val_size, settings.seed)
    return TrainingSplit(read, order_of(read, settings, trained), held)


def opened(
    pack: Pack,
    settings: FinetuneSettings,
    *,
    threads: int = 1,
    exact: bool = True,
    device: TrainingDevice | None = None,
) -> TrainableModel:
    options = TrainingOptions(64, exact=exact, balance=settings.moe_aux_loss_coef, device=device)
    return TrainableModel.open(pack, Pool(threads, spin_us=0), lora_of(settings), options)


def begun(
    trained: TrainableModel,
    settings: FinetuneSettings,
    output: Path,
    data: TrainingSplit | None = None,
    identity: RunIdentity = IDENTITY,
) -> FinetuneRun:
    output.mkdir(parents=True, exist_ok=True)
    data = data or data_of(samples(10), settings)
    return FinetuneRun(trained, data, settings, RunPlace(output, "base", identity))


def resumed(
    trained: TrainableModel, settings: FinetuneSettings, output: Path, folder: Path
) -> FinetuneRun:
    fill_factors(trained, folder)
    run = begun(trained, settings, output)
    run.restore(folder, checkpoint.load_state(folder))
    return run


def values(trained: TrainableModel) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{side}": value
        for name, each in trained.factors.items()
        for side, value in zip("ab", each.values, strict=True)
    }


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Seen:
    """Keeps what it is told."""

    def __init__(self, after: Callable[[int], Any] = lambda step: None) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[float] = []
        self.warnings: list[str] = []
        self._after = after

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)
        self._after(report.step)

    def evaluated(self, step: int, loss: float) -> None:
        self.evaluations.append(loss)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @property
    def losses(self) -> Sequence[float]:
        return [each.loss for each in self.reports]


def with_steps(settings: FinetuneSettings, steps: int, **more: Any) -> FinetuneSettings:
    return replace(settings, max_steps=steps, **more)
