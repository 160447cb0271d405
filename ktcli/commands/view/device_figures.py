"""Shows a benchmark's GPU figures in addition to the speed: experts on it, how busy it was, the cost of launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktcli.measure.bench import BenchResult
from ktcli.measure.policy import COPIES, GPU_EXPERTS, SEQUENTIAL, Policy
from ktcli.measure.trace import CPU, DEVICE, Trace
from ktcli.planner.plan import DevicePlan
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.engine.device.engine import DeviceEngine
    from ktcli.planner.device_cost import DeviceRates


@dataclass(frozen=True, slots=True)
class Used:
    """The device of an engine that is measured, with its plan, rates and policy."""

    engine: DeviceEngine
    plan: DevicePlan
    rates: DeviceRates
    policy: Policy


def device_figures(used: Used, result: BenchResult, trace: Trace | None) -> dict[str, Any]:
    """Returns the figures for --json.

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
    """Returns the figures of the traced step; the profiler slows it down a little, so shares count, not its time."""
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
    """Returns the share of the choices [MoE layers, E] that fell on experts of the device; 0 without choices."""
    return float(chosen[mask].sum() / max(1, chosen.sum()))


def device_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows for people."""
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
        rows.append(
            (
                "Launches",
                f"{found['launches_per_token']:.0f} per token,"
                f" {found['launch_percent']:.1f} % of the step",
            )
        )
    return rows


def _busy_words(found: dict[str, Any]) -> str:
    cpu = f"CPU {found['cpu_busy_percent']:.0f} %"
    gpu = found.get("gpu_busy_percent")
    return cpu if gpu is None else f"{cpu}, GPU {gpu:.0f} % of the time"
