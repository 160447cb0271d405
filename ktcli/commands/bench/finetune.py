"""`kt bench finetune`: the speed of fine-tuning on a model's shapes, forward and backward through a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ktcli.assembly.bench import PlannedTrial, Trial, plan_trial
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import find_subject
from ktcli.assembly.training import require_torch
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import (
    DenseOpt,
    ExpertsOpt,
    ModelArg,
    NumaOpt,
    RunsOpt,
    ThreadsOpt,
    layers_option,
)
from ktcli.commands.view import figures
from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.numa import asked_numa
from ktcli.measure.bench import Ceilings
from ktcli.models import Spec, build
from ktcli.native import Ceiling, Pool
from ktcli.output import out

if TYPE_CHECKING:
    from ktcli.training.bench import TrainingTimes

_RUNS, _LAYERS = 3, 4
_BOUNDS = {Ceiling.READ: "read bandwidth", Ceiling.BF16: "arithmetic peak"}
_LEAST = 2  # tokens of a document: the first of one is never trained


def finetune(
    model: ModelArg,
    layers: Annotated[int | None, layers_option(f"{_LAYERS}, or all of a smaller model")] = None,
    tokens: Annotated[
        int,
        option(
            "--tokens -n N",
            "Tokens per optimizer step, rounded up to whole documents.",
            min=_LEAST,
            max=1 << 17,
        ),
    ] = 2048,
    length: Annotated[
        int, option("--length N", "Tokens per document.", min=_LEAST, max=1 << 17)
    ] = 512,
    rank: Annotated[int, option("--rank -r N", "Rank of the adapter.", min=1, max=1024)] = 8,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    runs: RunsOpt = _RUNS,
) -> None:
    """Measure a step of LoRA fine-tuning, forward and backward of each layer.

    Random weights of the model's shapes, all on the CPU, with an adapter on attention, MLPs and
    experts. The times are compared with what this machine can compute or read at that moment; the
    speed of the whole model is that of its layers and its output head, without the optimizer.

    Examples:

      kt bench finetune qwen3-30b-a3b
      kt bench finetune deepseek-v2-lite --layers 2 --tokens 8192 --experts int8
      kt bench finetune kt-mini --rank 16 --json
    """
    require_torch()
    subject = find_subject(model, experts, dense)
    whole = build(subject.config).spec
    length = min(length, tokens)
    documents = -(-tokens // length)
    if length > whole.context:
        raise UsageError(
            f"documents of {length} tokens are longer than the model's context of {whole.context}",
            hint=f"use --length {whole.context} or less",
        )
    asked = Wanted(context=length, threads=threads, numa=asked_numa(numa))
    planned = plan_trial(Trial(subject, asked, layers or min(_LAYERS, whole.layers)), out)
    planned.plan.require("a model with these layers")
    pool = planned.start()
    ceilings = Ceilings.of(pool)
    times = _measured(planned, pool, ceilings, (documents, length), rank, runs)
    row = _row(subject.name, planned, times, documents * length, whole, rank)
    front = {key: row[key] for key in ("tok_s", "forward_ms", "backward_ms")}
    figures.show_results(
        planned.machine, pool, [row], lambda: _words(row, pool, ceilings), ceilings, front=front
    )
    figures.warn_noisy([times.step.others_share])


def _measured(
    planned: PlannedTrial,
    pool: Pool,
    ceilings: Ceilings,
    documents: tuple[int, int],
    rank: int,
    runs: int,
) -> TrainingTimes:
    from ktcli.measure.synthetic import ApartSource
    from ktcli.training.bench import TimedModel, measure_steps
    from ktcli.training.lora import LoraSettings, factor_bytes
    from ktcli.training.model import USUAL, TrainingOptions

    count, length = documents
    settings, recipe = LoraSettings(rank=rank), planned.plan.recipe
    options = TrainingOptions(context=length, max_rows=min(USUAL.max_rows, count * length))
    need = planned.plan.need_bytes + factor_bytes(planned.model, settings)
    free = planned.plan.host.available_bytes
    if need > free:
        hint = "use a smaller --rank, or fewer --layers"
        raise NotEnoughMemory("a model with these layers and its adapter", need, free, hint=hint)
    with out.progress(planned.title) as bar:
        model = TimedModel.load(
            planned.model, recipe, ApartSource(pool, 1), pool, settings, options,
            progress=lambda done, total: bar.update(done=done, total=total),
        )  # fmt: skip
    with out.progress("training steps", runs, unit="runs") as bar:
        return measure_steps(
            model, recipe, ceilings, documents=count, length=length, runs=runs,
            progress=lambda done: bar.update(done=done),
        )  # fmt: skip


def _row(
    name: str, planned: PlannedTrial, times: TrainingTimes, tokens: int, whole: Spec, rank: int
) -> dict[str, Any]:
    spec, recipe = planned.model.spec, planned.plan.recipe
    each = (times.forward_s + times.backward_s) / spec.layers
    return {
        "work": "finetune",
        "model": name,
        "format": recipe.experts_name if spec.moe_layers else None,
        "dense": recipe.dense.name,
        "layers": spec.layers,
        "n_tokens": tokens,
        "rank": rank,
        "trained_parameters": times.trained,
        "tok_s": tokens / (each * whole.layers + times.head_s),
        "forward_ms": 1e3 * times.forward_s / spec.layers,
        "backward_ms": 1e3 * times.backward_s / spec.layers,
        "head_ms": 1e3 * times.head_s,
        "forward_percent": 100 * times.forward_share,
        "backward_percent": 100 * times.backward_share,
        "forward_bound": _BOUNDS[times.forward_bound],
        "backward_bound": _BOUNDS[times.backward_bound],
        **figures.measured_figures(times.step),
    }


def _words(row: dict[str, Any], pool: Pool, ceilings: Ceilings) -> str:
    experts = f"{row['format']} experts, " if row["format"] else ""
    bound, back = row["forward_bound"], row["backward_bound"]
    return out.table(
        [
            ("Model", f"{row['model']}, {row['layers']} layers, {experts}{row['dense']} dense"),
            ("Threads", figures.threads_words(pool)),
            ("Ceiling", figures.ceiling_words(ceilings)),
            ("Step", f"{row['n_tokens']:,} tokens, rank {row['rank']}"),
            ("Trained", f"{row['trained_parameters']:,} parameters in these layers"),
            ("Forward", f"{row['forward_ms']:.1f} ms per layer, {row['forward_percent']:.0f} % of the {bound}"),
            ("Backward", f"{row['backward_ms']:.1f} ms per layer, {row['backward_percent']:.0f} % of the {back}"),
            ("Head", f"{row['head_ms']:.1f} ms with the loss"),
            ("Speed", f"{row['tok_s']:.1f} tokens/s for all layers, without the optimizer"),
        ]
    )  # fmt: skip
