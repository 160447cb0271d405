"""The plan of a run: what is trained is counted as it is written, and what does not fit is answered with what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from finetune.runs import SHORT, begun, data_of, opened, samples
from safetensors import safe_open

from ktcli.assembly.subject import find_subject
from ktcli.commands.view.finetune import plan_words
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.finetune.memory import program_elements
from ktcli.finetune.plan import PlannedModel, evaluations, plan_run
from ktcli.finetune.settings import FinetuneSettings
from ktcli.hardware.machine import Gpu
from ktcli.models import build
from ktcli.planner.cost import Rates
from ktcli.planner.spec import weight_bytes
from ktcli.samples.sample import SampleSet
from ktcli.training.recorded import dense_elements
from ktcli.weights.pack import Pack

GIB = 1 << 30


RATES = Rates(30e9, 1.4e12, 330e9, True, "measured here")


def about(name: str, available: int = 1 << 50, rates: Rates = RATES) -> PlannedModel:
    subject = find_subject(name)
    model = build(subject.config)
    return PlannedModel(name, model, subject.recipe, available, rates, "avx512")


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_parameters_are_those_that_are_written(
    name: str, pack_of: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = pack_of(name)
    plan = plan_run(
        PlannedModel(name, build(pack.config), pack.recipe, 1 << 50, RATES, "avx512"), SHORT, None
    )
    trained = opened(pack, SHORT)
    begun(trained, SHORT, tmp_path / "out").write_adapter(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="np") as file:
        written = sum(file.get_tensor(key).size for key in file.keys())  # noqa: SIM118
    assert plan.parameters == written
    assert plan.checkpoint_bytes == 12 * written
    factors = sum(t.numel() for each in trained.factors.values() for t in (each.a, each.b))
    assert {each.name: each.size_bytes for each in plan.memory}[
        "factors, gradients, moments"
    ] == 16 * factors


def test_experts_are_counted() -> None:
    """Qwen3-30B-A3B by hand: 48 layers, 128 experts of 768, hidden 2048, 32 heads and 4 of keys of 128; rank 8."""
    plan = plan_run(about("qwen3-30b-a3b"), FinetuneSettings(), None)
    found = {each.part: (each.matrices, each.parameters) for each in plan.parts}
    attention = (2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)
    experts = 128 * ((2048 + 1536) + (768 + 2048))
    assert found == {
        "attention": (48 * 4, 48 * 8 * attention),
        "routed experts": (48 * 2 * 128, 48 * 8 * experts),
    }
    assert plan.step_tokens == 8 * 2048 and plan.steps is None


def test_steps_and_tokens_are_those_of_the_data() -> None:
    settings = replace(SHORT, num_train_epochs=2, val_size=3)
    read = samples(13)
    plan = plan_run(about("kt-mini"), settings, data_of(read, settings))
    assert (plan.samples, plan.evaluated, plan.per_epoch, plan.steps) == (10, 3, 4, 8)
    lengths = sorted(
        len(read.samples[n].ids) for unit in data_of(read, settings).order.units for n in unit
    )
    assert plan.tokens == sum(lengths) and plan.step_tokens == sum(lengths[-3:])
    assert 0 < plan.trained_tokens < plan.tokens


@pytest.mark.parametrize(
    ("changed", "fewer"),
    [
        ({"lora_rank": 4}, True),
        ({"lora_target": ("q_proj",)}, True),
        ({"cutoff_len": 1024}, True),
        ({"gradient_accumulation_steps": 4}, True),
        ({"kt_cpu_activation": "retain"}, False),
        ({"lora_dropout": 0.1}, False),
        ({"optim": "adamw_bf16"}, True),
    ],
)
def test_memory_follows_the_settings(changed: dict[str, object], fewer: bool) -> None:
    model = about("qwen3-30b-a3b")
    usual = plan_run(model, FinetuneSettings(), None).need_bytes
    other = plan_run(model, replace(FinetuneSettings(), **changed), None).need_bytes  # type: ignore[arg-type]
    assert other < usual if fewer else other > usual


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    model = about("qwen3-30b-a3b")
    settings = FinetuneSettings()
    need = plan_run(model, settings, None).need_bytes
    weights = weight_bytes(model.model, model.recipe)
    plan = plan_run(replace(model, available_bytes=need - 1), settings, None)
    with pytest.raises(NotEnoughMemory, match="fine-tuning qwen3-30b-a3b needs") as found:
        plan.require()
    hint = found.value.hint
    assert "lora_rank=4" in hint and "lora_target=q_proj" in hint and "cutoff_len=1024" in hint
    assert "4 documents per step" in hint and "optim=adamw_bf16" in hint
    assert plan_run(
        replace(model, available_bytes=need - 1), replace(settings, lora_rank=4), None
    ).fits
    nothing = plan_run(replace(model, available_bytes=weights), settings, None)
    assert "its weights alone take" in nothing.advice


def test_an_evaluation_takes_memory_where_it_needs_more_than_a_step() -> None:
    """All documents of a step, and those of an evaluation that are far longer."""
    settings, model = replace(SHORT, per_device_eval_batch_size=2), about("qwen3-30b-a3b")
    data, long = data_of(samples(6), settings), samples(3)
    held = SampleSet(
        tuple(replace(e, ids=e.ids[:1] * 900, trained=e.trained[:1] * 900) for e in long.samples),
        (),
        "",
    )
    plain = plan_run(model, settings, data)
    found = plan_run(model, settings, replace(data, separate=held))
    part = "evaluation, beyond a step"
    sizes = [{e.name: e.size_bytes for e in each.memory} for each in (plain, found)]
    assert sizes[0][part] == 0 and sizes[1][part] > 2 * 900 * 7296 * 4
    assert found.need_bytes > plain.need_bytes
    assert (
        plan_run(
            model, replace(settings, per_device_eval_batch_size=1), replace(data, separate=held)
        ).need_bytes
        < found.need_bytes
    )


@pytest.mark.parametrize(
    ("settings", "steps", "times"),
    [
        ({}, 10, 3),
        ({"eval_steps": 4}, 10, 3),
        ({"eval_steps": 5}, 10, 2),
        ({"eval_strategy": "no"}, 10, 0),
        ({"eval_strategy": "epoch", "eval_steps": 1}, 8, 2),
    ],
)
def test_evaluations_are_counted_as_the_run_does_them(
    settings: dict[str, object], steps: int, times: int
) -> None:
    assert evaluations(replace(SHORT, **settings), steps, 4) == times  # type: ignore[arg-type]


def test_times_are_those_of_mean_steps_and_marked_where_rates_are_assumed() -> None:
    settings = replace(SHORT, num_train_epochs=2, val_size=3, eval_steps=1)
    data = data_of(samples(13), settings)
    plan = plan_run(about("kt-mini"), settings, data)
    assert plan.evaluations == plan.steps == 8
    assert plan.step_s and plan.evaluation_s and plan.evaluation_s < plan.step_s
    assert plan.run_s == pytest.approx(8 * (plan.step_s + plan.evaluation_s))
    assert "~" not in plan_words(plan) and "s in all, with 8 evaluations of" in plan_words(plan)
    guessed = plan_run(about("kt-mini", rates=replace(RATES, measured=False)), settings, None)
    assert guessed.run_s is None and guessed.step_s
    said = plan_words(guessed)
    assert "~ marks estimates: these rates are assumed" in said and "per step, ~" in said


def test_a_rank_that_a_matrix_cannot_have_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match=r"rank 4096 is more than .* can have"):
        plan_run(about("kt-mini"), FinetuneSettings(lora_rank=4096), None)


def test_memory_of_a_layer_is_that_of_its_products() -> None:
    """Of Qwen3-30B-A3B: queries, keys and values in one product, output, router; buffers, and eight experts' slots."""
    model = build(find_subject("qwen3-30b-a3b").config)
    assert max(dense_elements(model).values()) == 4096 + 512 + 512 + 2048 + 128
    slot = 2 * 2 * 768 + 2 * 768 + 2048
    assert program_elements(model) == 4096 + (4096 + 512 + 512) + 2048 + 8 * slot


def test_a_gpu_has_as_many_layers_as_fit_and_the_others_come_to_it() -> None:
    """What it has is not in main memory; with less than a layer's buffers it is refused, with what would fit."""
    settings, model = FinetuneSettings(cutoff_len=512), about("deepseek-v3")
    alone = plan_run(model, settings, None)
    gpu = Gpu(1, "Test", 24 * GIB, 23 * GIB)
    plan = plan_run(replace(model, gpu=gpu), settings, None)
    share = plan.gpu
    assert share is not None and share.fits and 0 < share.resident < share.layers
    more = plan_run(replace(model, gpu=replace(gpu, free_bytes=90 * GIB)), settings, None)
    assert more.gpu is not None and more.gpu.resident == more.gpu.layers == 61
    assert more.need_bytes < plan.need_bytes < alone.need_bytes
    sizes = {each.name: each.size_bytes for each in more.gpu.memory}
    weights = [next(e.size_bytes for e in p.memory if e.name == "weights") for p in (alone, more)]
    assert weights[1] + sizes["dense weights"] == pytest.approx(
        weights[0], rel=1e-6
    )  # in whole cache lines
    assert sizes["layers that are copied"] == 0
    assert "the weights of 61 of 61 layers stay there" in plan_words(more)
    assert "fine-tuning has not run on a GPU yet" in plan_words(more)
    small = plan_run(replace(model, gpu=replace(gpu, free_bytes=4 * GIB)), settings, None)
    with pytest.raises(NotEnoughMemory, match=r"fine-tuning deepseek-v3 on Test \(cuda:1\) needs"):
        small.require()
    assert "--device cpu" in small.advice
