"""`kt bench decode` and `kt bench prefill`: this machine's speed on a model's shapes.

`kt bench kernel`, one layer by itself, is in `kernel`; `kt bench resume` is in `resume`, `kt bench serve` in
`bench_serve`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ktcli.assembly.bench import PlannedTrial, Trial, plan_trial, refuse_without_gpu
from ktcli.assembly.host import torch_device
from ktcli.assembly.request import Wanted
from ktcli.assembly.subject import Subject, find_with_adapter
from ktcli.commands.bench.cache import cache
from ktcli.commands.bench.finetune import finetune
from ktcli.commands.bench.kernel import kernel
from ktcli.commands.bench.mixed import mixed
from ktcli.commands.bench.resume import resume
from ktcli.commands.bench.serve import serve
from ktcli.commands.cli.declarations import option, writable
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.options import (
    CommandFamily,
    DenseOpt,
    ExpertsOpt,
    LayersOpt,
    ModelArg,
    RunsOpt,
)
from ktcli.commands.view.figures import show_results
from ktcli.commands.view.speed import (
    Used,
    batch_words,
    device_figures,
    speed_row,
    speed_words,
    warn_about,
)
from ktcli.engine import Engine
from ktcli.errors import UsageError
from ktcli.measure.bench import BenchResult, Ceilings, Job, Phase, Roofline, run, traced
from ktcli.measure.clock import PAIRS
from ktcli.measure.policy import Policy
from ktcli.measure.synthetic import SPREAD_TOKENS
from ktcli.measure.trace import Trace
from ktcli.measure.trace import trace as cpu_trace
from ktcli.models import Spec, build
from ktcli.native import PAGE_TOKENS
from ktcli.output import out
from ktcli.planner.plan import DevicePlan
from ktcli.records import dataclass

MOST_ANSWERS = 64  # of --batch

app = CommandFamily("json")

ProfileOpt = Annotated[
    bool, option("--profile", "Also show where the time goes, by kind of operation.")
]


PolicyOpt = Annotated[
    Policy,
    option(
        f"--policy {'|'.join(policy.value for policy in Policy)}",
        "With a GPU: how the CPU and GPU share the experts, in kt's way or another program's.",
    ),
]


TraceOpt = Annotated[
    Path | None,
    option(
        "--trace FILE",
        "Also write a timeline of one step, for Perfetto or chrome://tracing.",
        callback=writable,
    ),
]
ContextOpt = Annotated[
    int, option("--context -c N", "Tokens in the cache before each run.", min=0, max=1 << 20)
]


def _batches(value: str) -> tuple[int, ...]:
    """The numbers of answers that --batch lists."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= MOST_ANSWERS for part in parts):
        raise UsageError(
            f"--batch cannot be {value[:40]!r}",
            hint=f"use numbers of answers from 1 to {MOST_ANSWERS}, for example 1,2,4,8,16",
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


BatchOpt = Annotated[
    str,
    option(
        "--batch -b N,N,...",
        "Number of answers written at the same time; one result row for each number.",
    ),
]


def _tokens(default: str) -> Any:
    return option("--tokens -n N", f"Tokens per run. {default}", min=1, max=1 << 20)


@app.command()
def decode(
    *,
    model: ModelArg,
    layers: LayersOpt = None,
    tokens: Annotated[int, _tokens("They are generated one after the other.")] = 32,
    context: ContextOpt = 0,
    batch: BatchOpt = "1",
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    options: EngineOptions,
    policy: PolicyOpt = Policy.KT,
    runs: RunsOpt = PAIRS,
    profile: ProfileOpt = False,
    trace: TraceOpt = None,
) -> None:
    """Measure the speed of an answer, in tokens per second.

    The result is compared with a ceiling, the memory's read bandwidth, measured between the runs.
    A converted model is loaded; for any other name kt knows, random weights of the true shapes are
    used, so nothing needs to be downloaded.

    Examples:

      kt bench decode qwen3-30b-a3b --layers 8

      kt bench decode qwen3-30b-a3b --layers 4 --context 16384 --profile

      kt bench decode deepseek-v3 --layers 4 --experts int8 --json

      kt bench decode qwen3-30b-a3b --layers 8 --batch 1,2,4,8,16

      kt bench decode qwen3-30b-a3b --gpu-experts 64 --defer 2 --trace step.json
    """
    measured = Measuring(Job(Phase.DECODE, tokens, context), runs, policy, profile, trace)
    if (batches := _batches(batch)) != (1,) and trace is not None:
        raise UsageError("--trace measures one answer only", hint="leave out --batch")
    _bench(find_with_adapter(model, experts, dense), options.wanted(), layers, measured, batches)


@app.command()
def prefill(
    *,
    model: ModelArg,
    layers: LayersOpt = None,
    tokens: Annotated[int, _tokens("This is the length of the prompt.")] = 512,
    context: ContextOpt = 0,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    options: EngineOptions,
    policy: PolicyOpt = Policy.KT,
    runs: RunsOpt = PAIRS,
    profile: ProfileOpt = False,
) -> None:
    """Measure the speed of reading a prompt, in tokens per second.

    The result is compared with a ceiling, the arithmetic peak of int8 and bf16, measured between
    the runs.

    Examples:

      kt bench prefill qwen3-30b-a3b --layers 8 --tokens 1024

      kt bench prefill kt-mini --profile
    """
    measured = Measuring(Job(Phase.PREFILL, tokens, context), runs, policy, profile)
    _bench(find_with_adapter(model, experts, dense), options.wanted(), layers, measured)


app.command()(resume)
app.command()(kernel)
app.command()(finetune)
app.command()(mixed)
app.command()(serve)
app.command()(cache)


@dataclass(frozen=True, slots=True)
class Measuring:
    """The options of a speed measurement.

    Attributes:
        runs: the number of runs of the job, each between two measurements of the ceiling.
        profile: whether the times of operations are shown.
        trace: the file for the timeline of one decode step; None: none is written.
    """

    job: Job
    runs: int
    policy: Policy
    profile: bool = False
    trace: Path | None = None

    def room(self, spec: Spec) -> int:
        """Returns the context length in tokens for which the engine is loaded: enough for the context and the tokens of
        a run, and for the SPREAD_TOKENS tokens on which the choices of experts are counted, as far as the model has so
        long a context.
        """
        return max(self.job.context + self.job.n_tokens, min(SPREAD_TOKENS, spec.context))

    def streams(self, spec: Spec, most: int) -> int:
        """Returns the number of sequences for which the engine is loaded: `most`, the largest number of simultaneous
        answers; twice as many for a model with recurrent state, whose states at the end of the context are copied.
        """
        return 2 * most if spec.sequence_elements else most


@dataclass(frozen=True, slots=True)
class Made:
    """A loaded engine to measure, and the ceilings to compare it with.

    Attributes:
        ceilings: the ceilings of the CPU, also where the roofline knows more.
        used: what is known of the device; None: there is none.
    """

    engine: Engine
    ceilings: Ceilings
    roofline: Roofline
    used: Used | None = None

    def row(
        self, subject: Subject, result: BenchResult, trace: Trace | None = None
    ) -> dict[str, Any]:
        """Returns the figures of a result as a row for --json, see `speed_row`; if a GPU was used, "device" has the
        figures of `device_figures`.

        Args:
            trace: the timeline of one decode step; None: none was taken.
        """
        row = speed_row(subject, self.engine, result)
        if self.used is not None:
            row["device"] = device_figures(self.used, result, trace)
        return row


def _bench(
    subject: Subject,
    asked: Wanted,
    layers: int | None,
    how: Measuring,
    batches: tuple[int, ...] = (1,),
) -> None:
    spec = build(subject.config).spec
    room = how.room(spec)
    if batches == (1,):
        asked = replace(asked, context=room)
    else:
        context = min(room + 2 * PAGE_TOKENS, max(spec.context, room))
        asked = replace(asked, context=context, streams=how.streams(spec, max(batches)))
    planned = plan_trial(Trial(subject, asked, layers), out)
    made = _made(planned, asked, how)
    jobs = [replace(how, job=replace(how.job, batch=n)) for n in batches]
    results = [_measured(subject, job, made) for job in jobs]
    trace = _traced(made, how) if batches == (1,) else None
    rows = [made.row(subject, result, trace) for result in results]
    if how.profile:
        for row, result in zip(rows, results, strict=True):
            row["profile_s"] = dict(result.profile.operations)
    pool, ceilings = made.engine.pool, made.ceilings

    def words() -> str:
        if batches == (1,):
            return speed_words(rows[0], results[0], pool, ceilings, how.profile)
        return batch_words(rows, results, pool, ceilings, how.profile)

    show_results(planned.machine, pool, rows, words, ceilings)
    warn_about(results)


def _measured(subject: Subject, how: Measuring, made: Made) -> BenchResult:
    with out.progress(f"{how.job.kind.value} {subject.title}", how.runs, unit="runs") as bar:
        return run(
            made.engine,
            how.job,
            made.roofline,
            pairs=how.runs,
            progress=lambda done: bar.update(done=done),
        )


def _made(planned: PlannedTrial, asked: Wanted, how: Measuring) -> Made:
    """Loads the engine of a plan, with or without a GPU."""
    if planned.plan.device is not None:
        return _made_with_device(planned, how.policy, planned.plan.device)
    policy = () if how.policy is Policy.KT else ("--policy",)
    refuse_without_gpu((*policy, *asked.device.of_gpu()))
    engine = planned.load(out)
    ceilings = Ceilings.of(engine.pool)
    return Made(engine, ceilings, ceilings)


def _made_with_device(planned: PlannedTrial, policy: Policy, used: DevicePlan) -> Made:
    from ktcli.measure.device_ceilings import DeviceCeilings, measure_rates
    from ktcli.planner.device_cost import slowest

    # While there is room for it.
    rates = slowest([measure_rates(torch_device(gpu.index)) for gpu in used.gpus])
    engine = planned.load_with_device(policy, out)
    roofline = DeviceCeilings.of(engine, rates)
    return Made(engine, roofline.cpu, roofline, Used(engine, used, rates, policy))


def _traced(made: Made, how: Measuring) -> Trace | None:
    """Traces a decode step, for --trace and for the figures of a device."""
    engine, used = made.engine, made.used
    if how.job.kind is not Phase.DECODE or (used is None and how.trace is None):
        return None
    if used is None:
        found = traced(engine, how.job.context, partial(cpu_trace, engine))
    else:
        from ktcli.measure.device_trace import trace as device_trace

        found = traced(engine, how.job.context, partial(device_trace, used.engine))
    if how.trace is not None:
        found.write(how.trace)
    return found
