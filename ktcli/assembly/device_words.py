"""A GPU in words: what the options about it mean to the planner, and how a plan with one is shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError, gib
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.text import cpu_text, whole
from ktcli.models.model import Spec
from ktcli.output import safe
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.experts import WISHES, Wish, parse_mask
from ktcli.planner.plan import Cost, DevicePlan, Request
from ktcli.planner.prefill import NEVER

MAX_BYTES = 1 << 20  # of a file of GPU experts; ten times the largest model's
_MOST = NEVER - 1
_EXPERTS = f"--gpu-experts takes a number per layer, {', '.join(WISHES)}, or a file"


@dataclass(frozen=True, slots=True)
class DeviceWords:
    """The options as typed; None and "auto" are the plan's own choice."""

    device: str = AUTO
    gpu_experts: str | None = None
    defer: int | None = None
    prefill_threshold: str | None = None

    def of_gpu(self) -> tuple[str, ...]:
        """Those given that only a GPU gives a meaning."""
        said = {
            "--gpu-experts": self.gpu_experts,
            "--prefill-threshold": self.prefill_threshold,
        }
        return tuple(option for option, value in said.items() if value is not None)

    def apply(self, request: Request, spec: Spec) -> Request:
        """`request` with what these words ask for.

        Raises:
            UsageError: a word means nothing, or a file is of another model.
            NotFound: there is no such file.
        """
        return replace(
            request,
            device=self.device,
            gpu_experts=_wish(self.gpu_experts, spec),
            defer=self.defer,
            prefill_threshold=_threshold(self.prefill_threshold),
        )


def _wish(said: str | None, spec: Spec) -> Wish:
    if said is None or said in WISHES:
        return said
    if (number := whole(said)) is not None:
        return number
    if not said.strip():
        raise UsageError("--gpu-experts is empty", hint=_EXPERTS)
    return parse_mask(_read(Path(said)), spec.moe_layers, spec.experts)


def _read(path: Path) -> str:
    try:
        return smallfiles.read_bounded(path, MAX_BYTES).decode("utf-8", "replace")
    except smallfiles.NotSmall as error:
        raise UsageError(
            f"{str(path)[:300]} is not a file of GPU experts: {error.strerror}", hint=_EXPERTS
        ) from error
    except OSError as error:
        raise NotFound(
            f"cannot read the file of GPU experts {str(path)[:300]}: {error.strerror}",
            hint=_EXPERTS,
        ) from error


def _threshold(said: str | None) -> int | None:
    if said is None:
        return None
    if said == "never":
        return NEVER
    number = whole(said)
    if number is None or number > _MOST:
        raise UsageError(
            f"--prefill-threshold is {said[:40]!r}", hint="a number of tokens, or never"
        )
    return number


# --- a plan with a GPU ------------------------------------------------------------------------------


def device_document(made: DevicePlan) -> dict[str, Any]:
    """What the GPU does, for --json."""
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
    """What the GPU does, for people."""
    taken = f"{gib(made.need.total)} of {gib(made.gpu.free_bytes)} free"
    busy = f"CPU {made.cpu_busy:.0%} and GPU {made.gpu_busy:.0%} busy while decoding"
    rows = [(f"GPU {made.gpu.index}", f"{safe(made.gpu.name)}, {taken}; {busy}")]
    return rows + [("", reason) for reason in made.reasons]


def rate_rows(rates: DeviceRates) -> list[tuple[str, str]]:
    """What it can do, and who says so."""
    words = (
        f"GPU read {rates.read_bps / 1e9:.0f} GB/s, bf16 {rates.bf16_ops / 1e12:.0f} TFLOP/s,"
        f" copies to it {rates.copy_bps / 1e9:.0f} GB/s"
    )
    return [("", words), *(("", why) for why in rates.basis.split("; "))]


def cost_words(cost: Cost) -> str:
    """ "--defer 0: 12.1 instead of 15.3 tokens/s of decode"."""
    own, forced = (
        f"{speed:.1f}" if speed < 100 else f"{speed:.0f}" for speed in (cost.own, cost.forced)
    )
    return f"{cost.option}: {forced} instead of {own} tokens/s of {cost.what}"
