"""Shows a measured speed, and what a GPU had of it: as a row of JSON, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktcli.assembly.subject import Subject
from ktcli.commands.view.figures import ceiling_words, measured_figures, threads_words, warn_noisy
from ktcli.engine import Engine
from ktcli.errors import counted, gib, predicted
from ktcli.measure.bench import BenchResult, Ceilings, Phase
from ktcli.measure.policy import COPIES, GPU_EXPERTS, SEQUENTIAL, Policy
from ktcli.measure.trace import CPU, DEVICE, Trace
from ktcli.models import build
from ktcli.native import Pool
from ktcli.output import out
from ktcli.planner.plan import DevicePlan
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.engine.device.engine import DeviceEngine
    from ktcli.planner.device_cost import DeviceRates


def speed_row(subject: Subject, engine: Engine, result: BenchResult) -> dict[str, Any]:
    """Returns the figures of a speed benchmark as a row for --json: the fields of `engine_figures`, tokens per second,
    bandwidth, operations, and the share of the ceiling in percent.
    """
    measured, spread = result.measured, result.spread
    attention_s = result.attention_s  # 0 where the CPU has none of it
    row: dict[str, Any] = {
        "work": result.job.kind.value,
        "model": subject.title,
        "format": engine.recipe.experts_name if engine.spec.moe_layers else None,
        "isa": engine.pool.isa,
        "threads": engine.pool.threads,
        "n_tokens": result.job.n_tokens,
        "context": result.job.context,
        "batch": result.job.batch,
        "tok_s": result.tok_s,
        "tok_s_min": result.job.tokens / measured.slowest_s,
        "tok_s_max": result.job.tokens / measured.fastest_s,
        "gb_s": result.read_bps / 1e9,
        "gop_s": result.ops / 1e9,
        "percent_of_ceiling": 100 * measured.share,
        "predicted_tok_s": result.job.tokens / result.predicted_s,
        "dense": engine.recipe.dense.name,
        "layers": engine.spec.layers,
        "layers_of_model": build(subject.config).spec.layers,
        "weights_bytes": engine.weights_bytes,
        "bytes_per_token": result.demand.read_bytes / result.job.tokens,
        "ops_per_token": result.demand.all_ops / result.job.tokens,
        **measured_figures(measured),
    }
    if result.job.kind is Phase.DECODE and engine.spec.moe_layers:
        row["experts_touched"] = result.job.touched or float(engine.spec.top_k)
    if attention_s:
        row["attention_gb_s"] = result.demand.attention[0] / attention_s / 1e9
        row["attention_gop_s"] = result.demand.attention[1] / attention_s / 1e9
    if spread is not None:
        row["experts_seen_percent"] = 100 * spread.seen
        row["experts_seen_percent_if_even"] = 100 * spread.expected
        row["busiest_expert_load"] = spread.busiest
    return row


def speed_words(
    row: dict[str, Any], result: BenchResult, pool: Pool, ceilings: Ceilings, profile: bool
) -> str:
    """Returns a row of `speed_row` as a table of text, with the times of operations below it if `profile`."""
    of = "read bandwidth" if result.job.kind is Phase.DECODE else "arithmetic peak"
    layers = f"{row['layers']} of {row['layers_of_model']} layers"
    experts = f"{row['format']} experts, " if row["format"] else ""
    weights = f"{experts}{row['dense']} dense, {gib(row['weights_bytes'])}"
    rows = [
        ("Model", f"{row['model']}, {layers}, {weights}"),
        ("Threads", threads_words(pool)),
        (
            result.job.kind.value.capitalize(),
            f"{row['tok_s']:.1f} tokens/s ({row['tok_s_min']:.1f} to {row['tok_s_max']:.1f},"
            f" {counted(row['runs'], 'run')} of {counted(row['n_tokens'], 'token')})",
        ),
        ("Memory", f"{row['gb_s']:.1f} GB/s, {gib(row['bytes_per_token'])} per token"),
        ("Arithmetic", f"{row['gop_s']:.0f} GOP/s, {row['ops_per_token'] / 1e9:.2f} GOP per token"),
        ("Ceiling", ceiling_words(ceilings)),
        *([("Attention", _attention_words(row))] if "attention_gb_s" in row else []),
        ("Reached", f"{row['percent_of_ceiling']:.0f} % of the {of}"),
        ("Plan", f"{predicted(row['predicted_tok_s'])} tokens/s predicted from these ceilings"),
    ]
    if result.spread is not None:
        rows.append(("Experts", _spread_words(result)))
    if "device" in row:
        rows += device_rows(row["device"])
    text = out.table(rows)
    return f"{text}\n\n{_profile_table(result)}" if profile else text


def _attention_words(row: dict[str, Any]) -> str:
    after = f", after {row['context']} tokens" if row["context"] else ""
    return f"{row['attention_gb_s']:.1f} GB/s, {row['attention_gop_s']:.0f} GFLOP/s{after}"


def _spread_words(result: BenchResult) -> str:
    spread = result.spread
    assert spread is not None
    return (
        f"{spread.tokens} tokens reached {spread.seen:.0%} of them (even chances: {spread.expected:.0%}),"
        f" the busiest {spread.busiest:.1f} times the mean"
    )


def _profile_table(result: BenchResult) -> str:
    seconds = result.measured.seconds
    operations = [*result.profile.operations]
    operations.append(("between operations", max(0.0, seconds - result.profile.seconds)))
    steps = result.job.tokens / result.job.batch
    rows = [(name, f"{1e3 * s / steps:.3f} ms", f"{s / seconds:.1%}") for name, s in operations]
    per = "per token" if result.job.batch == 1 else f"per step of {result.job.batch} answers"
    return out.table(rows, ("operation", per, "share"), right=(1, 2))


def batch_words(
    rows: list[dict[str, Any]],
    results: list[BenchResult],
    pool: Pool,
    ceilings: Ceilings,
    profile: bool,
) -> str:
    """Returns the rows of a benchmark with several numbers of simultaneous answers as text: a table with a row for each
    number: tokens per second, the gain over the first row, and the experts per layer that a step uses.
    """
    first = speed_words(rows[0], results[0], pool, ceilings, profile=False).split("\n")
    head = [line for line in first if line.startswith(("Model", "Threads", "Ceiling"))]
    lines = [
        (
            str(row["batch"]),
            f"{row['tok_s']:.1f}",
            f"{row['tok_s'] / row['batch']:.1f}",
            f"{row['tok_s'] / rows[0]['tok_s']:.2f}",
            f"{row['experts_touched']:.1f}" if "experts_touched" in row else "-",
            f"{row['percent_of_ceiling']:.0f} %",
        )
        for row in rows
    ]
    titles = ("answers", "tokens/s", "each", "gain", "experts", "of the limit")
    speeds = "\n".join(head) + "\n\n" + out.table(lines, titles, right=(0, 1, 2, 3, 4, 5))
    return "\n\n".join([speeds, *(map(_profile_table, results) if profile else [])])


def warn_about(results: list[BenchResult]) -> None:
    """Prints warnings about conditions that make the figures of benchmark results less reliable: other processes, and
    uneven choices of experts.
    """
    warn_noisy(result.measured.others_share for result in results)
    result = results[0]
    if result.spread is not None and not result.spread.even:
        out.warn(
            "the random weights favour some experts: a trained model spreads its choices more evenly"
        )


@dataclass(frozen=True, slots=True)
class Used:
    """The device of an engine that is measured, with its plan, rates and policy."""

    engine: DeviceEngine
    plan: DevicePlan
    rates: DeviceRates
    policy: Policy


def device_figures(used: Used, result: BenchResult, trace: Trace | None) -> dict[str, Any]:
    """Returns the figures of a GPU in a benchmark, for --json: experts on it by layer, hit rates and busy times in
    percent, and its rates.

    Args:
        trace: the trace of one decode step; None: none was taken.
    """
    placement, host = used.engine.placement, used.engine.host
    parts = dict(result.profile.operations)
    cpu_s = result.profile.seconds - sum(parts.get(name, 0.0) for name in (GPU_EXPERTS, COPIES))
    found: dict[str, Any] = {
        "gpu": used.plan.names,
        "policy": used.policy.value,
        "handoff": host.handoff.value if host else None,
        "gpu_experts": placement.mask.sum(axis=1).tolist(),
        "rule": used.plan.rule,
        "hit_percent": 100 * hit_rate(result.chosen, placement.mask),
        "hit_percent_planned": 100 * used.plan.hit_rate,
        "defer": used.engine.depth_at(result.job.context),
        "cpu_busy_percent": 100 * cpu_s / result.measured.seconds,
        "read_gb_s": used.rates.read_bps / 1e9,
        "bf16_tflop_s": used.rates.bf16_ops / 1e12,
        "copy_gb_s": used.rates.copy_bps / 1e9,
    }
    if used.policy in SEQUENTIAL:
        found["phases_s"] = parts
    if trace is not None:
        found |= trace_figures(trace)
    return found


def trace_figures(trace: Trace) -> dict[str, Any]:
    """Returns the figures of a traced decode step for --json: its milliseconds (with the profiler's overhead), kernel
    launches, and busy shares of CPU and GPU in percent.
    """
    of_device = [event for event in trace.events if event.track == DEVICE]
    found: dict[str, Any] = {
        "traced_step_ms": 1e3 * trace.seconds,
        "launches_per_token": trace.launches,
        "launch_percent": 100 * trace.launch_share,
        "cpu_busy_percent_traced": 100 * trace.busy_share(CPU),
    }
    if of_device:
        found["gpu_busy_percent"] = 100 * trace.busy_share(DEVICE)
        found["kernels_per_token"] = len(of_device)
    return found


def hit_rate(chosen: NDArray[np.int64], mask: NDArray[np.bool_]) -> float:
    """Returns the share, 0 to 1, of the choices of experts that fell on experts of the GPU; 0 without choices. `chosen`
    has counts and `mask` the experts on the GPU, both [MoE layers, E].
    """
    return float(chosen[mask].sum() / max(1, chosen.sum()))


def device_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the GPU's figures of `device_figures` as rows of a table for people, each a label and a text."""
    counts = found["gpu_experts"]
    each = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    rows = [
        (
            "GPU",
            f"{found['gpu']}: read {found['read_gb_s']:.0f} GB/s, bf16 {found['bf16_tflop_s']:.0f}"
            f" TFLOP/s, copies to it {found['copy_gb_s']:.1f} GB/s",
        ),
        (
            "Experts there",
            f"{each} per layer ({found['rule']}), {found['hit_percent']:.0f} % of the hits"
            f" ({found['hit_percent_planned']:.0f} % planned), {found['defer']} deferred",
        ),
        ("Busy", _busy_words(found)),
    ]
    if "phases_s" in found:
        words = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in found["phases_s"].items())
        rows.append(("Phases", f"{words} of a run, policy {found['policy']}"))
    if "launches_per_token" in found:
        share = f"{found['launch_percent']:.1f} % of the step"
        rows.append(("Launches", f"{found['launches_per_token']:.0f} per token, {share}"))
    return rows


def _busy_words(found: dict[str, Any]) -> str:
    cpu = f"CPU {found['cpu_busy_percent']:.0f} %"
    gpu = found.get("gpu_busy_percent")
    return cpu if gpu is None else f"{cpu}, GPU {gpu:.0f} % of the time"
