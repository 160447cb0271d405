"""The judge of whole runs: torch's AdamW over transformers with peft, on the same data from the same factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.judge import NEEDS_PEFT, load_peft, quietly
from finetune.runs import Seen, begun, data_of, opened, samples, values, with_steps
from reference import Case, case_named
from training.judge import reference_model

from ktcli.finetune.run import FinetuneRun
from ktcli.finetune.settings import FinetuneSettings
from ktcli.finetune.trained import fill_factors
from ktcli.training.model import TrainableModel
from ktcli.weights.pack import Pack

pytestmark = NEEDS_PEFT

# An epsilon above the rounding of gradients: an element whose true gradient is below it would else be moved by noise.
SETTINGS = FinetuneSettings(
    lora_rank=4,
    gradient_accumulation_steps=3,
    learning_rate=2e-4,
    weight_decay=0.01,
    loraplus_lr_ratio=4.0,
    max_grad_norm=0.5,
    adam_epsilon=1e-6,
    lr_scheduler_type="cosine",
)


def judged(run: FinetuneRun, model: Any, settings: FinetuneSettings, steps: int) -> list[float]:
    """Trains peft's model on the samples of each step, one document after the other, and returns its losses."""
    from transformers import get_scheduler

    named = [(n, p) for n, p in model.named_parameters() if "lora_" in n]
    thinned = _thin(model, run._trained) if settings.lora_dropout else Thinned()
    for _, parameter in named:
        parameter.requires_grad_()
    rates = {"lora_A": 1.0, "lora_B": settings.loraplus_lr_ratio or 1.0}
    groups = [
        {"params": [p for n, p in named if side in n], "lr": settings.learning_rate * ratio}
        for side, ratio in rates.items()
    ]
    adam = torch.optim.AdamW(groups, eps=settings.adam_epsilon, weight_decay=settings.weight_decay)
    schedule = get_scheduler("cosine", adam, math.ceil(settings.warmup_ratio * steps), steps)
    losses = []
    for step in range(steps):
        chosen = [run._data.read.samples[n] for n in run._data.order.samples(step)]
        total = sum(sum(each.trained[1:]) for each in chosen)
        adam.zero_grad()
        loss = 0.0
        thinned.step, thinned.first = step, 0
        thinned.rows = sum(len(each.ids) for each in chosen)
        for each in chosen:
            logits = model(torch.tensor([each.ids])).logits[0].float()
            rows = [at - 1 for at in range(1, len(each.ids)) if each.trained[at]]
            labels = torch.tensor([each.ids[row + 1] for row in rows])
            part = torch.nn.functional.cross_entropy(logits[rows], labels, reduction="sum") / total
            part.backward()
            thinned.first += len(each.ids)
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_([p for _, p in named], settings.max_grad_norm)
        adam.step()
        schedule.step()
        losses.append(loss)
    return losses


def agrees(
    run: FinetuneRun,
    case: Case,
    checkpoint_of: Callable[[Case], Path],
    settings: FinetuneSettings,
    folder: Path,
) -> dict[str, torch.Tensor]:
    """Trains, and has the judge train from the adapter that kt wrote before the first step: losses and parameters
    agree. Returns the parameters."""
    (folder / "begin").mkdir()
    run.write_adapter(folder / "begin")
    base = reference_model(case, checkpoint_of(case))
    with quietly():
        model = load_peft(base, folder / "begin", is_trainable=True)
    seen = Seen()
    run.train(seen)
    losses = judged(run, model.eval(), settings, settings.max_steps)
    assert seen.losses == pytest.approx(losses, abs=2e-6)
    with quietly():
        model.save_pretrained(folder / "judge")
    ours = values(run._trained)
    fill_factors(run._trained, folder / "judge")
    theirs = values(run._trained)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= 1e-6
    return ours


class Thinned:
    """The rows of a step that a judge computes: which step, how many rows, and the first of its document."""

    step = rows = first = 0


def _thin(model: Any, trained: TrainableModel) -> Thinned:
    """Gives each module of peft the masks of kt in place of its own, which are random."""
    at = Thinned()

    class Dropped(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dropout = trained.dropout
            with dropout.during(at.step):
                kept = dropout.thinned(self.name, torch.ones(at.rows, x.shape[-1]))
                return x * kept[at.first : at.first + x.shape[-2]] * dropout.scale

    found = 0
    for name, module in model.named_modules():
        if name.removeprefix("base_model.model.") in trained.factors:
            module.lora_dropout["default"] = Dropped(name.removeprefix("base_model.model."))
            found += 1
    assert found == len(trained.factors)
    return at


@pytest.mark.parametrize(
    ("name", "steps"),
    [("qwen3", 5), ("deepseek-v3", 5), pytest.param("gpt-oss", 50, marks=pytest.mark.thorough)],
)
def test_dropout_is_that_of_peft(
    name: str,
    steps: int,
    pack_of: Callable[..., Pack],
    checkpoint_of: Callable[[Case], Path],
    tmp_path: Path,
) -> None:
    """In the same place of each module: with kt's masks in place of peft's the same parameters come out. Latent
    attention has two stored matrices of one module; queries, keys and values are one of three."""
    attention = {"deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
    usual = ("q_proj", "k_proj", "v_proj")
    targets = (*attention.get(name, usual), "o_proj")
    settings = with_steps(SETTINGS, steps, lora_dropout=0.25, lora_target=targets)
    trained = opened(pack_of(name, "f32", "f32"), settings)
    run = begun(trained, settings, tmp_path / "out", data_of(samples(10), settings))
    agrees(run, case_named(name), checkpoint_of, settings, tmp_path)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("qwen3", 5),
        pytest.param("qwen3", 50, marks=pytest.mark.thorough),
        pytest.param("deepseek-v3", 50, marks=pytest.mark.thorough),
        pytest.param("gpt-oss", 50, marks=pytest.mark.thorough),
    ],
)
def test_a_run_equals_torch_and_peft(
    name: str,
    steps: int,
    pack_of: Callable[..., Pack],
    checkpoint_of: Callable[[Case], Path],
    tmp_path: Path,
) -> None:
    """Parameters after so many steps; the judge begins with the adapter that kt wrote before the first."""
    settings = with_steps(SETTINGS, steps)
    trained = opened(pack_of(name, "f32", "f32"), settings)
    run = begun(trained, settings, tmp_path / "out", data_of(samples(10), settings))
    begin = values(trained)
    ours = agrees(run, case_named(name), checkpoint_of, settings, tmp_path)
    moved = max(float((ours[key] - begin[key]).abs().max()) for key in ours)
    assert moved > 1e-4 * steps


def test_peft_reads_what_is_written_and_gives_the_logits_of_the_run(
    pack_of: Callable[..., Pack], checkpoint_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    settings = with_steps(SETTINGS, 4)
    trained = opened(pack_of("qwen3", "f32", "f32"), settings)
    run = begun(trained, settings, tmp_path / "out")
    before = trained.logits([[1, 2, 3, 4, 5]])[0]
    result = run.train(Seen())
    case = case_named("qwen3")
    with quietly():
        model = load_peft(reference_model(case, checkpoint_of(case)), result.checkpoint).eval()
        logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0].detach()
        merged = model.merge_and_unload()(torch.tensor([[1, 2, 3, 4, 5]])).logits[0].detach()
    found = trained.logits([[1, 2, 3, 4, 5]])[0]
    assert float((found - before).abs().max()) > 1e-3
    assert float((found - logits).abs().max()) <= 1e-4 * float(logits.std())
    assert float((found - merged).abs().max()) <= 1e-4 * float(logits.std())


def test_accumulated_documents_are_one_step(pack_of: Callable[..., Pack], tmp_path: Path) -> None:
    """16 × 1 equals 1 × 16, as all documents of a step go through the model together."""
    found = []
    for at, (batch, accumulation) in enumerate(((1, 16), (16, 1), (4, 4))):
        settings = with_steps(
            SETTINGS, 2, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation
        )
        trained = opened(pack_of("qwen3"), settings)
        data = data_of(samples(20), settings)
        begun(trained, settings, tmp_path / str(at), data).train(Seen())
        found.append(values(trained))
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)
