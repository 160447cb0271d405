"""What a run does between its first step and its last: it learns, evaluates, warns, and stops where numbers end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune.runs import SHORT, Seen, begun, data_of, opened, samples, values, with_steps
from tokenizers import Tokenizer

from ktcli.errors import KtError, OutOfDeviceMemory, UsageError
from ktcli.finetune import checkpoint
from ktcli.finetune.log import LOG
from ktcli.finetune.optimizer import FactorOptimizer
from ktcli.finetune.plan import TrainingSplit
from ktcli.finetune.trained import fill_factors
from ktcli.resources import data_path
from ktcli.samples.sample import Sample, SampleSet
from ktcli.training.model import TrainableModel
from ktcli.weights.pack import Pack


def test_one_row_is_learned_by_heart(pack_of: Callable[..., Pack], tmp_path: Path) -> None:
    """And the files of the model stay as they are."""
    settings = with_steps(SHORT, 30, learning_rate=5e-3, lr_scheduler_type="constant", lora_rank=8)
    tokenizer = Tokenizer.from_file(str(data_path("profiles", "kt-mini", "tokenizer.json")))
    ids = tokenizer.encode("kt knows that a cat is one of the experts of this machine.").ids
    row = Sample(tuple(ids), tuple(at > 2 for at in range(len(ids))), "a row")
    before = {path: path.read_bytes() for path in pack_of("kt-mini").path.iterdir()}
    trained, seen = opened(pack_of("kt-mini"), settings, exact=False), Seen()
    data = data_of(SampleSet((row,), (), ""), settings)
    result = begun(trained, settings, tmp_path, data).train(seen)
    assert seen.losses[0] > 3 and result.loss is not None and result.loss < 0.01
    assert {path: path.read_bytes() for path in before} == before


def test_numbers_that_end_stop_the_run_with_the_last_good_adapter(
    pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 9, save_steps=2)
    trained = opened(pack_of("qwen3"), settings)
    good: dict[str, torch.Tensor] = {}

    def spoil(step: int) -> None:
        if step == 2:
            good.update(values(trained))
        if step == 3:
            next(iter(trained.factors.values())).b.data.fill_(float("inf"))

    with pytest.raises(KtError) as found:
        begun(trained, settings, tmp_path).train(Seen(spoil))
    said = str(found.value)
    assert "step 4 of 9: the output of layer 0 contains NaN or infinite numbers" in said
    assert "; the adapter of step 3 gives such numbers of any sample" in said
    assert f"{tmp_path / 'checkpoint-2'} has the adapter of step 2, the last good one" in said
    assert "lower learning rate" in found.value.hint
    assert [each.name for each in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    other = opened(pack_of("qwen3"), settings)
    fill_factors(other, tmp_path / "checkpoint-2")
    assert all(torch.equal(good[key], each) for key, each in values(other).items())


def test_an_evaluation_that_is_not_finite_stops_the_run_behind_its_step(
    pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 9, val_size=2, eval_steps=3)
    trained = opened(pack_of("qwen3"), settings)
    run = begun(trained, settings, tmp_path)
    monkeypatch.setattr(run, "evaluate", lambda: trained.loss([[1, 2]], [[True, True]]))
    real = TrainableModel._head

    def head(model: TrainableModel, x: torch.Tensor) -> torch.Tensor:
        return real(model, x) * (torch.nan if len(x) == 1 else 1.0)

    monkeypatch.setattr(TrainableModel, "_head", head)
    with pytest.raises(KtError, match=r"the evaluation behind step 3 of 9: the output head .* NaN"):
        run.train(Seen())
    assert [each.name for each in checkpoint.checkpoints(tmp_path)] == ["checkpoint-3"]


def test_held_out_samples_are_weighed_by_their_tokens(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 4, val_size=5, eval_steps=2, per_device_eval_batch_size=2)
    data = data_of(samples(12), settings)
    trained, seen = opened(pack_of("qwen3"), settings), Seen()
    run = begun(trained, settings, tmp_path, data)
    run.train(seen)
    held = [data.read.samples[number] for number in data.held]
    whole = trained.loss([each.ids for each in held], [each.trained for each in held])
    assert len(seen.evaluations) == 2
    assert seen.evaluations[-1] == pytest.approx(whole, rel=1e-5)
    chosen = {number for unit in data.order.units for number in unit}
    assert len(held) == 5 and not chosen & set(data.held)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [each["current_steps"] for each in lines if "eval_loss" in each] == [2, 4]
    assert lines[-1]["percentage"] == 100.0 and lines[-1]["total_steps"] == 4
    assert {"loss", "lr", "epoch", "elapsed_time", "remaining_time"} <= lines[0].keys()


def test_samples_of_their_own_evaluate_behind_each_epoch(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 5)
    own = data_of(samples(5), settings)
    data = TrainingSplit(own.read, own.order, (), samples(3, seed=9))
    seen = Seen()
    result = begun(opened(pack_of("qwen3"), settings), settings, tmp_path, data).train(seen)
    assert len(seen.evaluations) == 3  # 2 steps an epoch, and the last
    assert result.evaluated == seen.evaluations[-1]


def test_overfitting_is_said_with_the_best_step(
    pack_of: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 6, val_size=2, eval_steps=1)
    found = iter([2.0, 1.0, 1.1, 1.2, 1.3, 1.0])
    monkeypatch.setattr(TrainableModel, "loss", lambda *_: next(found))
    monkeypatch.setattr("ktcli.finetune.run.FinetuneRun.evaluate", lambda _: next(found))
    seen = Seen()
    begun(opened(pack_of("qwen3"), settings), settings, tmp_path).train(seen)
    (said,) = seen.warnings
    assert "risen three times" in said and "lowest at step 2 (1.0000)" in said


def test_entries_are_means_of_their_steps(pack_of: Callable[..., Pack], tmp_path: Path) -> None:
    settings = with_steps(SHORT, 5, logging_steps=2)
    seen = Seen()
    run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path)
    run.train(seen)
    losses = list(seen.losses)
    expected = [(2, sum(losses[:2]) / 2), (4, sum(losses[2:4]) / 2), (5, losses[4])]
    assert run.log.losses == [(step, pytest.approx(loss)) for step, loss in expected]


def test_the_loss_of_routers_is_logged_beside_that_of_tokens(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    losses = []
    for at, factor in enumerate((0.0, 10.0)):
        settings = with_steps(SHORT, 3, moe_aux_loss_coef=factor, lr_scheduler_type="constant")
        run = begun(opened(pack_of("qwen3"), settings), settings, tmp_path / str(at))
        run.train(Seen())
        losses.append([each["loss"] for each in run.log.entries])
    assert losses[0][0] == losses[1][0] and losses[0][2] != losses[1][2]
    assert all(each["aux_loss"] > 1 for each in run.log.entries)


def test_the_first_step_of_a_warm_up_moves_nothing_but_moments(
    pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 1, warmup_steps=1)
    trained = opened(pack_of("qwen3"), settings)
    before = values(trained)
    begun(trained, settings, tmp_path).train(Seen())
    assert all(torch.equal(before[key], each) for key, each in values(trained).items())


def test_a_full_gpu_in_a_step_of_the_optimizer_is_said(
    pack_of: Callable[..., Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_steps(SHORT, 1)
    trained = opened(pack_of("qwen3"), settings)
    read: SampleSet = samples(3)
    trained.loss_and_gradients([e.ids for e in read.samples], [e.trained for e in read.samples])

    def full(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with pytest.raises(OutOfDeviceMemory, match="ran out during a step of the optimizer"):
        FactorOptimizer(trained.factors, settings).step(1.0)


@pytest.mark.parametrize(("limit", "scales"), [(1e-3, True), (0.0, False), (1e9, False)])
def test_gradients_are_clipped_by_their_norm_together(
    limit: float, scales: bool, pack_of: Callable[..., Pack]
) -> None:
    settings = with_steps(SHORT, 1, max_grad_norm=limit)
    trained = opened(pack_of("qwen3"), settings)
    read: SampleSet = samples(3)
    trained.loss_and_gradients([e.ids for e in read.samples], [e.trained for e in read.samples])
    before = [g.clone() for each in trained.factors.values() for g in each.gradients]
    whole = torch.cat([each.flatten() for each in before]).double().norm()
    norm = FactorOptimizer(trained.factors, settings).step(1.0)
    after = [g for each in trained.factors.values() for g in each.gradients]
    assert norm == pytest.approx(float(whole), rel=1e-5)
    share = limit / norm if scales else 1.0
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one * share, other, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_rank": 2}, "has rank 4 and scale 2 at .*, this run rank 2 and scale 2"),
        ({"lora_alpha": 4.0}, "has rank 4 and scale 2 at .*, this run rank 4 and scale 1"),
        ({"lora_target": ("q_proj", "k_proj")}, "changes .*, other than this run would"),
        ({"lora_target": ("all", "mlp.gate")}, "does not change .*mlp.gate, other than this run would"),
    ],
)  # fmt: skip
def test_a_run_begins_with_an_adapter_of_its_own_shape(
    changed: dict[str, Any], said: str, pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    settings = with_steps(SHORT, 2)
    first = opened(pack_of("qwen3"), settings)
    folder = begun(first, settings, tmp_path).train(Seen()).checkpoint
    again = opened(pack_of("qwen3"), settings)
    fill_factors(again, folder)
    assert all(torch.equal(values(first)[key], each) for key, each in values(again).items())
    other = opened(pack_of("qwen3"), replace(settings, **changed))
    with pytest.raises(UsageError, match=said):
        fill_factors(other, folder)
