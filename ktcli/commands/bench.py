"""`kt bench decode` and `kt bench prefill`: this machine's speed on a model's shapes.

`kt bench kernel`, one layer by itself, is in `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ktcli.commands.figures import (
    ceiling_figures,
    ceiling_words,
    machine_figures,
    threads_words,
    warn_noisy,
)
from ktcli.commands.kernel import kernel
from ktcli.commands.options import (
    DenseOpt,
    ExpertsOpt,
    JsonOpt,
    ModelArg,
    NumaOpt,
    RunsOpt,
    ThreadsOpt,
)
from ktcli.commands.subject import Subject, find_subject
from ktcli.engine.bench import CEILING_BYTES, Ceilings, Job, Kind, Result, run
from ktcli.engine.engine import Engine
from ktcli.engine.measure import PAIRS
from ktcli.engine.synthetic import SPREAD_TOKENS, Request, random_engine
from ktcli.errors import gib
from ktcli.hardware.machine import Machine
from ktcli.hardware.numa import Numa, asked_numa
from ktcli.hardware.probe import probe
from ktcli.models import build
from ktcli.native import Pool
from ktcli.output import out, table
from ktcli.planner.memory import margin_bytes

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
    runs: RunsOpt = PAIRS,
    profile: ProfileOpt = False,
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
    """
    wanted = Wanted(Job(Kind.DECODE, tokens, context), layers, threads, runs, asked_numa(numa))
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
    wanted = Wanted(Job(Kind.PREFILL, tokens, context), layers, threads, runs, asked_numa(numa))
    _bench(find_subject(model, experts, dense), wanted, profile)


app.command()(kernel)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asked for."""

    job: Job
    layers: int | None
    threads: int | None
    runs: int
    numa: Numa


def _bench(subject: Subject, wanted: Wanted, profile: bool) -> None:
    machine = probe()
    engine = _engine(subject, wanted, machine)
    for warning in engine.warnings:
        out.warn(warning)
    ceilings = Ceilings.of(engine.pool)
    with out.progress(f"{wanted.job.kind.value} {subject.name}", wanted.runs, unit="runs") as bar:
        result = run(
            engine,
            wanted.job,
            ceilings,
            pairs=wanted.runs,
            progress=lambda done: bar.update(done=done),
        )
    whole = build(subject.config).spec.layers
    row = _row(subject, engine, result, whole)
    if profile:
        row["profile_s"] = dict(result.profile.operations)
    out.result(
        {
            "machine": machine_figures(machine, engine.pool),
            "ceilings": ceiling_figures(ceilings),
            "results": [row],
        },
        lambda: _render(row, result, engine.pool, ceilings, profile),
    )
    _warn(result)


def _engine(subject: Subject, wanted: Wanted, machine: Machine) -> Engine:
    """The converted model if there is one and all of it is wanted, else random weights."""
    # Room for the tokens whose experts are counted, where the model has it.
    need = wanted.job.context + wanted.job.n_tokens
    context = max(need, min(SPREAD_TOKENS, build(subject.config).spec.context))
    if subject.pack is not None and wanted.layers is None:
        with out.progress(f"loading {subject.name}") as bar:
            return Engine.load(
                subject.pack,
                context=context,
                threads=wanted.threads,
                numa=wanted.numa,
                progress=lambda done, total: bar.update(done=done, total=total),
            )
    free = machine.memory.free_bytes - CEILING_BYTES - margin_bytes(machine.memory.total_bytes)
    request = Request(subject.recipe, wanted.layers, context, free, wanted.threads, wanted.numa)
    with out.progress(f"random weights of {subject.name}") as bar:
        return random_engine(
            subject.config,
            request,
            progress=lambda done, total: bar.update(done=done, total=total),
        )


def _row(subject: Subject, engine: Engine, result: Result, whole: int) -> dict[str, Any]:
    """One result, with the keys every benchmark of kt has first."""
    measured, spread = result.measured, result.spread
    row: dict[str, Any] = {
        "work": result.job.kind.value,
        "model": subject.name,
        "format": engine.recipe.experts.name,
        "isa": engine.pool.isa,
        "threads": engine.pool.threads,
        "n_tokens": result.job.n_tokens,
        "context": result.job.context,
        "tok_s": result.tok_s,
        "tok_s_min": result.job.n_tokens / measured.slowest_s,
        "tok_s_max": result.job.n_tokens / measured.fastest_s,
        "gb_s": result.read_bps / 1e9,
        "gop_s": result.ops / 1e9,
        "percent_of_ceiling": 100 * measured.share,
        "predicted_tok_s": result.job.n_tokens / result.predicted_s,
        "dense": engine.recipe.dense.name,
        "layers": engine.spec.layers,
        "layers_of_model": whole,
        "weights_bytes": engine.weights_bytes,
        "bytes_per_token": result.demand.read_bytes / result.job.n_tokens,
        "ops_per_token": result.demand.all_ops / result.job.n_tokens,
        "attention_gb_s": result.demand.attention[0] / result.attention_s / 1e9,
        "attention_gop_s": result.demand.attention[1] / result.attention_s / 1e9,
        "runs": len(measured.runs),
        "noisy": measured.noisy,
        "others_percent": 100 * measured.others_share,
    }
    if spread is not None:
        row["experts_seen_percent"] = 100 * spread.seen
        row["experts_seen_percent_if_even"] = 100 * spread.expected
        row["busiest_expert_load"] = spread.busiest
    return row


def _render(
    row: dict[str, Any], result: Result, pool: Pool, ceilings: Ceilings, profile: bool
) -> str:
    of = "read bandwidth" if result.job.kind is Kind.DECODE else "arithmetic peak"
    layers = f"{row['layers']} of {row['layers_of_model']} layers"
    weights = f"{row['format']} experts, {row['dense']} dense, {gib(row['weights_bytes'])}"
    rows = [
        ("Model", f"{row['model']}, {layers}, {weights}"),
        ("Threads", threads_words(pool)),
        (
            result.job.kind.value.capitalize(),
            f"{row['tok_s']:.1f} tokens/s ({row['tok_s_min']:.1f} to {row['tok_s_max']:.1f},"
            f" {row['runs']} runs of {row['n_tokens']} tokens)",
        ),
        ("Memory", f"{row['gb_s']:.1f} GB/s, {gib(row['bytes_per_token'])} per token"),
        ("Arithmetic", f"{row['gop_s']:.0f} GOP/s, {row['ops_per_token'] / 1e9:.2f} GOP per token"),
        ("Ceiling", ceiling_words(ceilings)),
        ("Attention", _attention_words(row)),
        ("Reached", f"{row['percent_of_ceiling']:.0f} % of the {of}"),
        ("Plan", f"{row['predicted_tok_s']:.1f} tokens/s predicted from these ceilings"),
    ]
    if result.spread is not None:
        rows.append(("Experts", _spread_words(result)))
    text = table(rows)
    return f"{text}\n\n{_profile_table(result)}" if profile else text


def _attention_words(row: dict[str, Any]) -> str:
    after = f", after {row['context']} tokens" if row["context"] else ""
    return f"{row['attention_gb_s']:.1f} GB/s, {row['attention_gop_s']:.0f} GFLOP/s{after}"


def _spread_words(result: Result) -> str:
    spread = result.spread
    assert spread is not None
    return (
        f"{spread.tokens} tokens reached {spread.seen:.0%} of them (even chances: {spread.expected:.0%}),"
        f" the busiest {spread.busiest:.1f} times the mean"
    )


def _profile_table(result: Result) -> str:
    seconds = result.measured.seconds
    operations = [*result.profile.operations]
    operations.append(("between operations", max(0.0, seconds - result.profile.seconds)))
    rows = [
        (name, f"{1e3 * s / result.job.n_tokens:.3f} ms", f"{s / seconds:.1%}")
        for name, s in operations
    ]
    return table(rows, ("operation", "per token", "share"), right=(1, 2))


def _warn(result: Result) -> None:
    if result.measured.noisy:
        warn_noisy(result.measured.others_share)
    if result.spread is not None and not result.spread.even:
        out.warn("the random weights favour some experts: a trained model spreads them wider")
