"""`kt bench decode` and `kt bench prefill`: this machine's speed on a model's shapes.

`kt bench kernel`, one layer by itself, is in `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli.assembly.host import host_here, torch_device, usable
from ktcli.assembly.plan import informed
from ktcli.assembly.request import DeviceWords
from ktcli.assembly.subject import Subject, find_subject
from ktcli.commands.kernel import kernel
from ktcli.commands.options import (
    DeferOpt,
    DenseOpt,
    DeviceOpt,
    ExpertsOpt,
    GpuExpertsOpt,
    JsonOpt,
    ModelArg,
    NumaOpt,
    PrefillThresholdOpt,
    RunsOpt,
    ThreadsOpt,
    writable,
)
from ktcli.commands.view.device_figures import Seen, device_figures
from ktcli.commands.view.figures import ceiling_figures, machine_figures
from ktcli.commands.view.speed import speed_row, speed_words, warn_about
from ktcli.engine.cpu import Engine
from ktcli.engine.policy import Policy
from ktcli.errors import UsageError
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import Numa, asked_numa
from ktcli.hardware.probe import probe
from ktcli.measure.bench import (
    CEILING_BYTES,
    Ceilings,
    Job,
    Kind,
    Result,
    Yardstick,
    run,
    traced,
)
from ktcli.measure.clock import PAIRS
from ktcli.measure.synthetic import SPREAD_TOKENS, Request, fitting_plan, random_engine
from ktcli.models import Model, Spec, build, cut
from ktcli.output import out
from ktcli.planner.deferral import require
from ktcli.planner.host import Host
from ktcli.planner.memory import margin_bytes
from ktcli.planner.placement import place
from ktcli.planner.plan import DevicePlan, Plan
from ktcli.planner.plan import Request as PlanRequest
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.engine.device.engine import DeviceEngine

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Measure speed, without a download if need be.",
)

LayersOpt = Annotated[
    int | None,
    typer.Option(
        "--layers", "-l", min=1, help="Decoder layers. Default: as many as fit in memory."
    ),
]
ProfileOpt = Annotated[
    bool, typer.Option("--profile", help="Also show where the time went, by kind of operation.")
]


PolicyOpt = Annotated[
    Policy,
    typer.Option(
        "--policy",
        help="With a GPU: how CPU and GPU share the experts, kt's way or another program's.",
    ),
]


TraceOpt = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        callback=writable,
        metavar="FILE",
        help="Also write what happened when in one step, for Perfetto or chrome://tracing.",
    ),
]
ContextOpt = Annotated[
    int,
    typer.Option(
        "--context", "-c", min=0, max=1 << 20, help="Tokens in the cache before each run."
    ),
]


def _tokens(default: str) -> Any:
    return typer.Option("--tokens", "-n", min=1, max=1 << 20, help=f"Tokens of one run. {default}")


@app.command()
def decode(
    model: ModelArg,
    layers: LayersOpt = None,
    tokens: Annotated[int, _tokens("One after the other.")] = 32,
    context: ContextOpt = 0,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    device: DeviceOpt = AUTO,
    gpu_experts: GpuExpertsOpt = None,
    defer: DeferOpt = None,
    prefill_threshold: PrefillThresholdOpt = None,
    policy: PolicyOpt = Policy.KT,
    runs: RunsOpt = PAIRS,
    profile: ProfileOpt = False,
    trace: TraceOpt = None,
    json: JsonOpt = False,
) -> None:
    """Tokens per second of an answer.

    The ceiling beside it is the memory's read bandwidth, taken between the runs. A model that is
    converted is loaded; of any other name kt knows, the true shapes are filled with random weights,
    so nothing needs to be downloaded.

    Examples:

      kt bench decode qwen3-30b-a3b --layers 8

      kt bench decode qwen3-30b-a3b --layers 4 --context 16384 --profile

      kt bench decode deepseek-v3 --layers 4 --experts int8 --json

      kt bench decode qwen3-30b-a3b --gpu-experts 64 --defer 2 --trace step.json
    """
    words = DeviceWords(device, gpu_experts, defer, prefill_threshold)
    job, teams = Job(Kind.DECODE, tokens, context), asked_numa(numa)
    wanted = Wanted(job, layers, threads, runs, teams, words, policy, trace)
    _bench(find_subject(model, experts, dense), wanted, profile)


@app.command()
def prefill(
    model: ModelArg,
    layers: LayersOpt = None,
    tokens: Annotated[int, _tokens("The length of the prompt.")] = 512,
    context: ContextOpt = 0,
    experts: ExpertsOpt = None,
    dense: DenseOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    device: DeviceOpt = AUTO,
    gpu_experts: GpuExpertsOpt = None,
    defer: DeferOpt = None,
    prefill_threshold: PrefillThresholdOpt = None,
    policy: PolicyOpt = Policy.KT,
    runs: RunsOpt = PAIRS,
    profile: ProfileOpt = False,
    json: JsonOpt = False,
) -> None:
    """Tokens per second of reading a prompt.

    The ceiling beside it is the arithmetic peak of int8 and bf16, taken between the runs.

    Examples:

      kt bench prefill qwen3-30b-a3b --layers 8 --tokens 1024

      kt bench prefill kt-mini --profile
    """
    words = DeviceWords(device, gpu_experts, defer, prefill_threshold)
    job, teams = Job(Kind.PREFILL, tokens, context), asked_numa(numa)
    wanted = Wanted(job, layers, threads, runs, teams, words, policy)
    _bench(find_subject(model, experts, dense), wanted, profile)


app.command()(kernel)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asked for.

    Attributes:
        trace: where to write what happened in one decode step; None: nowhere.
    """

    job: Job
    layers: int | None
    threads: int | None
    runs: int
    numa: Numa
    words: DeviceWords
    policy: Policy
    trace: Path | None = None

    def room(self, spec: Spec) -> int:
        """Positions for the runs, and for the tokens whose experts are counted, where the model has them."""
        return max(self.job.context + self.job.n_tokens, min(SPREAD_TOKENS, spec.context))


@dataclass(frozen=True, slots=True)
class Made:
    """An engine and what it is compared with.

    Attributes:
        ceilings: of the CPU, also where the yardstick knows more.
    """

    engine: Engine | DeviceEngine
    ceilings: Ceilings
    yardstick: Yardstick


def _bench(subject: Subject, wanted: Wanted, profile: bool) -> None:
    machine = probe()
    found = planned(subject, wanted, machine)
    seen = None
    if found is not None and found[1].device is not None:
        result, made, seen = _with_device(subject, wanted, *found, found[1].device)
    else:
        _refuse_without(wanted)
        engine = _engine(subject, wanted, machine)
        ceilings = Ceilings.of(engine.pool)
        made = Made(engine, ceilings, ceilings)
        result = _measured(subject, wanted, made)
        if wanted.trace is not None:
            traced(engine, wanted.job.context).write(wanted.trace)
    row = speed_row(subject, made.engine, result)
    if seen is not None:
        row["device"] = device_figures(seen, result)
    if profile:
        row["profile_s"] = dict(result.profile.operations)
    pool, ceilings = made.engine.pool, made.ceilings
    out.result(
        {
            "machine": machine_figures(machine, pool),
            "ceilings": ceiling_figures(ceilings),
            "results": [row],
        },
        lambda: speed_words(row, result, pool, ceilings, profile),
    )
    warn_about(result)


def _measured(subject: Subject, wanted: Wanted, made: Made) -> Result:
    for warning in made.engine.warnings:
        out.warn(warning)
    with out.progress(f"{wanted.job.kind.value} {subject.name}", wanted.runs, unit="runs") as bar:
        return run(
            made.engine,
            wanted.job,
            made.yardstick,
            pairs=wanted.runs,
            progress=lambda done: bar.update(done=done),
        )


def _refuse_without(wanted: Wanted) -> None:
    """Options that only a GPU gives a meaning."""
    policy = () if wanted.policy is Policy.KT else ("--policy",)
    if given := (*policy, *wanted.words.of_gpu()):
        raise UsageError(
            f"{given[0]} is about a GPU, and none is used here",
            hint="kt doctor shows what was found, kt plan where a model would go",
        )


# --- with a GPU -------------------------------------------------------------------------------------


def planned(subject: Subject, wanted: Wanted, machine: Machine) -> tuple[Model, Plan] | None:
    """What is measured, with its plan, where a GPU might be used; None: every layer runs on the CPU.

    Raises:
        DeviceError: a GPU was asked for, and there is none or it cannot be used.
    """
    asked = wanted.words.device
    if asked == CPU or not usable(machine, asked, out):
        return None
    host = host_here(machine, wanted.threads, wanted.numa, torch=True)
    whole = build(subject.config).spec
    spec = whole if wanted.layers is None else build(cut(subject.config, wanted.layers)).spec
    request = wanted.words.apply(PlanRequest(subject.recipe, wanted.room(whole)), spec)
    if subject.pack is not None and wanted.layers is None:
        request = informed(request, subject.pack, whole, machine.gpus, out.warn)
        model = build(subject.config)
        return model, place(model, host, request)
    return fitting_plan(subject.config, _without_ceilings(host), request, wanted.layers)


def _without_ceilings(host: Host) -> Host:
    """The host with the memory taken that the ceilings are measured in."""
    beside = host.beside
    if beside is None:
        return host
    left = beside.available_bytes - CEILING_BYTES
    return replace(host, beside=replace(beside, available_bytes=left))


def _with_device(
    subject: Subject, wanted: Wanted, model: Model, plan: Plan, used: DevicePlan
) -> tuple[Result, Made, Seen]:
    from ktcli.measure.device_ceilings import DeviceCeilings, measure_rates
    from ktcli.measure.device_synthetic import Setting, planned_engine

    device = torch_device(used.gpu.index)
    rates = measure_rates(device)  # before the weights, while there is room for it
    whole = subject.pack is not None and wanted.layers is None
    pack = Pack.open(subject.pack) if whole and subject.pack is not None else None
    setting = Setting(device, wanted.policy, numa=wanted.numa, pack=pack)
    with out.progress(f"{'loading' if pack else 'random weights of'} {subject.name}") as bar:
        engine = planned_engine(
            model, plan, setting, lambda done, total: bar.update(done=done, total=total)
        )
    yardstick = DeviceCeilings.of(engine, rates)
    made = Made(engine, yardstick.cpu, yardstick)
    result = _measured(subject, wanted, made)
    trace = traced(engine, wanted.job.context) if wanted.job.kind is Kind.DECODE else None
    if trace is not None and wanted.trace is not None:
        trace.write(wanted.trace)
    return result, made, Seen(engine, used, rates, trace)


# --- on the CPU alone -------------------------------------------------------------------------------


def _engine(subject: Subject, wanted: Wanted, machine: Machine) -> Engine:
    """The converted model if there is one and all of it is wanted, else random weights."""
    spec, defer = build(subject.config).spec, wanted.words.defer or 0
    require(defer, spec.top_k)
    context = wanted.room(spec)
    if subject.pack is not None and wanted.layers is None:
        with out.progress(f"loading {subject.name}") as bar:
            return Engine.load(
                subject.pack,
                context=context,
                threads=wanted.threads,
                numa=wanted.numa,
                defer=defer,
                progress=lambda done, total: bar.update(done=done, total=total),
            )
    free = machine.memory.free_bytes - CEILING_BYTES - margin_bytes(machine.memory.total_bytes)
    request = Request(
        subject.recipe, wanted.layers, context, free, wanted.threads, wanted.numa, defer
    )
    with out.progress(f"random weights of {subject.name}") as bar:
        return random_engine(
            subject.config,
            request,
            progress=lambda done, total: bar.update(done=done, total=total),
        )
