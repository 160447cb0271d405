"""`kt bench mixed`: the speed of answers while a long prompt is read."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from ktcli.assembly.bench import Trial, plan_trial, refuse_without_gpu
from ktcli.assembly.subject import find_subject
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.options import DenseOpt, ExpertsOpt, LayersOpt, ModelArg, declared
from ktcli.commands.view.figures import engine_figures, show_results, threads_words, warn_noisy
from ktcli.engine import Engine
from ktcli.measure.clock import NOISY_SHARE, Others
from ktcli.measure.mixed import MixedJob, MixedResult, measure_mixed
from ktcli.models import build
from ktcli.output import out


@partial(declared, without=("kv",))
def mixed(
    *,
    model: ModelArg,
    layers: LayersOpt = None,
    streams: Annotated[
        int, option("--streams N", "Number of answers in progress.", min=1, max=15)
    ] = 4,
    tokens: Annotated[
        int, option("--tokens -n N", "Length of the prompt, in tokens.", min=64, max=1 << 20)
    ] = 4096,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    options: EngineOptions,
) -> None:
    """Measure answers and a long prompt that run at the same time.

    Several answers are in progress when a prompt arrives. Each side keeps part of the speed it
    would have alone: answers at least 40 %, the prompt at least 65 %, where the machine allows
    both.

    Examples:

      kt bench mixed qwen3-30b-a3b --layers 8

      kt bench mixed qwen3-30b-a3b --layers 4 --streams 8 --tokens 2048 --json
    """
    subject = find_subject(model, experts, dense)
    most = build(subject.config).spec.context
    job = MixedJob(streams, min(tokens, most - 256))
    context = min(job.context, most)
    asked = options.wanted(context, streams=streams + 1)
    planned = plan_trial(Trial(subject, asked, layers), out)
    used = planned.plan.device
    engine: Engine
    if used is None:
        refuse_without_gpu(asked.device.of_gpu())
        engine = planned.load(out)
    else:
        engine = planned.load_with_device(listener=out)
    others = Others()
    with out.progress(f"mixed {subject.name}", None, unit="steps") as bar:
        result = measure_mixed(engine, job, lambda done: bar.update(done=done))
    busy = others.share()
    row = mixed_row(subject.name, engine, result)
    row["noisy"] = busy > NOISY_SHARE
    show_results(planned.machine, engine.pool, [row], lambda: mixed_words(row, engine))
    warn_noisy([busy])


def mixed_row(name: str, engine: Engine, result: MixedResult) -> dict[str, Any]:
    """Returns the result of a mixed benchmark as a row for --json: tokens per second of the answers and seconds of the
    prompt, each alone and together, their ratios in percent, and the longest gap between two steps of the answers in
    seconds.
    """
    job, gap = result.job, max(result.gaps_s, default=0.0)
    return {
        **engine_figures("mixed", name, engine),
        "streams": job.streams,
        "n_tokens": job.prompt_tokens,
        "stream_tok_s_alone": result.alone_tok_s,
        "stream_tok_s": result.beside_tok_s,
        "streams_percent": 100 * result.streams_share,
        "prompt_s_alone": result.prompt_alone_s,
        "prompt_s": result.prompt_beside_s,
        "prompt_percent": 100 * result.prompt_share,
        "mixed_step_s": result.mixed_s,
        "longest_gap_s": gap,
        "longest_gap_steps": gap / result.mixed_s if result.mixed_s else 0.0,
    }


def mixed_words(row: dict[str, Any], engine: Engine) -> str:
    """Returns a row of `mixed_row` as a table of text for the terminal."""
    rows = [
        ("Model", f"{row['model']}, {row['layers']} layers, {row['format'] or 'no'} experts"),
        ("Threads", threads_words(engine.pool)),
        (
            f"{row['streams']} answers",
            f"{row['stream_tok_s']:.1f} tokens/s each alongside the prompt, {row['stream_tok_s_alone']:.1f} without:"
            f" {row['streams_percent']:.0f} %",
        ),
        (
            f"Prompt of {row['n_tokens']:,}",
            f"{row['prompt_s']:.2f} s alongside the answers, {row['prompt_s_alone']:.2f} s without:"
            f" {row['prompt_percent']:.0f} %",
        ),
        (
            "Longest wait",
            f"{1e3 * row['longest_gap_s']:.0f} ms; a step with part of the prompt takes"
            f" {1e3 * row['mixed_step_s']:.0f} ms",
        ),
    ]
    return out.table(rows)
