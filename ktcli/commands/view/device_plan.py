"""Shows a plan with a GPU: as a document, and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ktcli.errors import gib, predicted
from ktcli.hardware.text import cpu_text
from ktcli.output import safe
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.plan import Cost, DevicePlan, SegmentPlan


def device_document(made: DevicePlan) -> dict[str, Any]:
    """Returns the GPUs' part of a plan, for --json."""
    return {
        "gpus": [_segment_document(each) for each in made.segments],
        "need_bytes": made.need.total,
        "parts": asdict(made.need),
        "experts": {
            "rule": made.rule,
            "per_layer": list(made.n_experts),
            "ids": [cpu_text(ids) for ids in made.resident],
            "hit_rate": made.hit_rate,
            "cpu_hits": list(made.k_cpu),
        },
        "defer": made.depth,
        "defer_from": [list(pair) for pair in made.depths],
        "prefill_threshold": made.prefill_threshold if made.streams else None,
        "prefill_chunk": made.chunk,
        "stream_experts": made.stream_experts,
        "times_us": {
            "cpu_expert": made.times.expert_s * 1e6,
            "gpu_layer": made.times.device_s * 1e6,
            "gpu_shared": made.times.shared_s * 1e6,
        },
        "busy": {"cpu": made.cpu_busy, "gpu": made.gpu_busy},
        "rates": {
            "read_gb_s": made.rates.read_bps / 1e9,
            "bf16_tflop_s": made.rates.bf16_ops / 1e12,
            "copy_gb_s": made.rates.copy_bps / 1e9,
            "measured": made.rates.measured,
            "basis": made.rates.basis,
        },
        "reasons": list(made.reasons),
    }


def _segment_document(each: SegmentPlan) -> dict[str, Any]:
    return {
        "index": each.gpu.index,
        "name": each.gpu.name,
        "free_bytes": each.gpu.free_bytes,
        "layers": [each.layers.start, each.layers[-1]],
        "need_bytes": each.need.total,
        "budget_bytes": each.budget_bytes,
        "parts": asdict(each.need),
    }


def device_rows(made: DevicePlan) -> list[tuple[str, str]]:
    """Returns the GPUs' part of a plan, for people."""
    rows = [(f"GPU {each.gpu.index}", _segment_words(made, each)) for each in made.segments]
    busy = f"CPU {made.cpu_busy:.0%} and GPU {made.gpu_busy:.0%} busy while decoding"
    if len(rows) == 1:
        rows = [(rows[0][0], f"{rows[0][1]}; {busy}")]
    else:
        rows.append(("", f"{busy}: the GPUs work one after the other"))
    return rows + [("", reason) for reason in made.reasons]


def _segment_words(made: DevicePlan, each: SegmentPlan) -> str:
    """The words for a GPU: "NVIDIA L20, layers 0-18, 30.1 GiB of 44.5 GiB free"."""
    taken = f"{gib(each.need.total)} of {gib(each.gpu.free_bytes)} free"
    some = f", layers {each.layers.start}-{each.layers[-1]}" if len(made.segments) > 1 else ""
    return f"{safe(each.gpu.name)}{some}, {taken}"


def rate_rows(rates: DeviceRates) -> list[tuple[str, str]]:
    """Returns the GPU's rates and where they come from, for people."""
    words = (
        f"GPU read {rates.read_bps / 1e9:.0f} GB/s, bf16 {rates.bf16_ops / 1e12:.0f} TFLOP/s,"
        f" copies to it {rates.copy_bps / 1e9:.0f} GB/s"
    )
    return [("", words), *(("", why) for why in rates.basis.split("; "))]


def cost_words(cost: Cost) -> str:
    """Returns the sentence "--defer 0: decode at 12.1 instead of 15.3 tokens/s"."""
    own, forced = predicted(cost.own), predicted(cost.forced)
    changes = {"memory": cost.memory_bytes, "GPU memory": cost.device_bytes}
    more = "".join(
        f", {gib(abs(size))} {'more' if size > 0 else 'less'} {what}"
        for what, size in changes.items()
        if size
    )
    return f"{cost.option}: {cost.what} at {forced} instead of {own} tokens/s{more}"
