"""Shows a plan with a GPU: as a document, and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ktcli.errors import gib, predicted
from ktcli.hardware.text import cpu_text
from ktcli.output import safe
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.plan import Cost, DevicePlan


def device_document(made: DevicePlan) -> dict[str, Any]:
    """The GPU's part of a plan, for --json."""
    return {
        "gpu": {"index": made.gpu.index, "name": made.gpu.name, "free_bytes": made.gpu.free_bytes},
        "need_bytes": made.need.total,
        "budget_bytes": made.budget_bytes,
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


def device_rows(made: DevicePlan) -> list[tuple[str, str]]:
    """The GPU's part of a plan, for people."""
    taken = f"{gib(made.need.total)} of {gib(made.gpu.free_bytes)} free"
    busy = f"CPU {made.cpu_busy:.0%} and GPU {made.gpu_busy:.0%} busy while decoding"
    rows = [(f"GPU {made.gpu.index}", f"{safe(made.gpu.name)}, {taken}; {busy}")]
    return rows + [("", reason) for reason in made.reasons]


def rate_rows(rates: DeviceRates) -> list[tuple[str, str]]:
    """The GPU's rates and where they come from, for people."""
    words = (
        f"GPU read {rates.read_bps / 1e9:.0f} GB/s, bf16 {rates.bf16_ops / 1e12:.0f} TFLOP/s,"
        f" copies to it {rates.copy_bps / 1e9:.0f} GB/s"
    )
    return [("", words), *(("", why) for why in rates.basis.split("; "))]


def cost_words(cost: Cost) -> str:
    """The sentence "--defer 0: 12.1 instead of 15.3 tokens/s of decode"."""
    own, forced = predicted(cost.own), predicted(cost.forced)
    return f"{cost.option}: {forced} instead of {own} tokens/s of {cost.what}"
