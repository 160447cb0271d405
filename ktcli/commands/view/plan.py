"""Shows a plan, also of GPUs: as a document, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ktcli.assembly.disk import DiskNeed
from ktcli.commands.view.bars import bars_of, draw
from ktcli.errors import gib, predicted
from ktcli.hardware.team import NodeTeam
from ktcli.hardware.text import cpu_text, numbered
from ktcli.output import out, safe, table
from ktcli.planner.device_cost import DeviceRates
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.planner.plan import (
    ON_GPU,
    Cost,
    DevicePlan,
    Lever,
    Line,
    Plan,
    SegmentPlan,
    early_position,
)

_NARROW = 70  # columns below which the table of parts is short


def document(name: str, made: Plan) -> dict[str, Any]:
    """Returns the plan of a model as the document for --json: whether it fits, the bytes of each part, predicted tokens
    per second, the machine and its rates, and advice.
    """
    host, speed = made.host, made.speed
    return {
        "model": name,
        "fits": made.fits,
        "need_bytes": made.need_bytes,
        "available_bytes": host.available_bytes,
        "context": made.context,
        "experts": made.recipe.experts_name,
        "dense": made.recipe.dense.name,
        "machine": {
            "name": host.name,
            "threads": host.threads,
            "isa": host.isa,
            "teams": [asdict(team) for team in host.teams],
        },
        "nodes": [{**asdict(need), "fits": need.fits} for need in made.nodes],
        "traffic_bytes": made.traffic_bytes,
        **({"experts_on": _experts_on(made)} if made.experts_on else {}),
        "rates": {
            "read_gb_s": host.rates.read_bps / 1e9,
            "int8_gop_s": host.rates.int8_ops / 1e9,
            "bf16_gflop_s": host.rates.bf16_ops / 1e9,
            "measured": host.rates.measured,
            "basis": host.rates.basis,
        },
        "predicted": {
            "decode_tok_s": speed.decode,
            "decode_tok_s_full_context": speed.decode_full,
            "prefill_tok_s": speed.prefill,
        },
        "lines": [asdict(line) for line in made.lines],
        "advice": [lever.text for lever in made.advice],
        "levers": [lever_document(lever) for lever in made.advice if lever.plan],
        "notes": list(made.notes),
        **({"device": device_document(made.device)} if made.device else {}),
        **({"costs": [asdict(cost) for cost in made.costs]} if made.costs else {}),
    }


def lever_document(lever: Lever) -> dict[str, Any]:
    """Returns a change of options that would help a plan as a document for --json: the options, and the memory, formats
    and predicted tokens per second with them.
    """
    plan = lever.plan
    assert plan is not None
    return {
        "options": lever.options,
        "need_bytes": plan.need_bytes,
        "device_need_bytes": plan.device.need.total if plan.device else 0,
        "context": plan.context,
        "experts": plan.recipe.experts_name,
        "dense": plan.recipe.dense.name,
        "cache": plan.use.cache_format.name,
        "defer": plan.depths[0][1],
        "decode_tok_s": plan.speed.decode,
        "prefill_tok_s": plan.speed.prefill,
    }


def render(
    name: str, made: Plan, disk: DiskNeed | None = None, following: Sequence[str] = ()
) -> str:
    """Returns the plan of a model as text for the terminal: whether it fits, bars of memory, tables of parts and
    predictions, notes and advice.

    Args:
        disk: the bytes to download and convert; None: the plan is for another machine.
        following: further lines at the end, such as what to do next.
    """
    said, colour = ("fits", "green") if made.fits else ("does not fit", "red")
    sentence = out.fold(f"{safe(name)} {said}{_sizes(made)}", "  ")
    verdict = sentence.replace(f" {said}", f" {out.style(said, colour)}", 1)
    words = [verdict, "", draw(bars_of(made, disk)), "", _parts(made), ""]
    if made.nodes:
        words += [_nodes(made), ""]
    words.append(_facts(made))
    if made.costs:
        words += [
            "",
            "Effect of the options given:",
            *(f"  {cost_words(cost)}" for cost in made.costs),
        ]
    if made.notes:
        words += ["", *(out.fold(f"Note: {safe(note)}", "  ") for note in made.notes)]
    words += ["", verdict]
    if made.advice:
        words += [
            "Instead:" if made.fits else "What would make it fit:",
            *(out.fold(f"  {lever.text}", "    ") for lever in made.advice),
        ]
    return "\n".join([*words, *following])


def _sizes(made: Plan) -> str:
    """The needed and the free bytes, of memory and of the GPU; or of the node that is too small although the
    whole memory is not."""
    have = made.host.available_bytes
    full = next((need for need in made.nodes if not need.fits), None)
    if full is not None and made.need_bytes <= have:
        return f" on node {full.node}: needs {gib(full.need_bytes)}, {gib(full.free_bytes)} is free there"
    if made.device is None:
        return f": needs {gib(made.need_bytes)}, {gib(have)} is free"
    gpus, need = made.device.gpus, made.device.need.total
    where, free = numbered("GPU", [gpu.index for gpu in gpus]), sum(gpu.free_bytes for gpu in gpus)
    return (
        f": needs {gib(made.need_bytes)} of memory, {gib(have)} is free;"
        f" needs {gib(need)} on {where}, {gib(free)} is free"
    )


def _parts(made: Plan) -> str:
    """The table of parts, a line each; with a GPU, the place stands before the size.

    A narrow terminal has room for what lies where, and no more.
    """
    if out.width is not None and out.width < _NARROW:
        brief = [(line.part, _place_word(line), gib(line.size_bytes)) for line in made.lines]
        return out.table(brief, ("part", "where", "size"), right=(2,))
    head = ("part", "format", "memory", "read/token", "decode", "prefill", "why")
    rows = [
        (
            line.part,
            line.format,
            gib(line.size_bytes) if line.size_bytes else "",
            gib(line.decode_bytes) if line.decode_bytes else "",
            _ms(line.decode_s),
            _ms(line.prefill_s),
            line.reason,
        )
        for line in made.lines
    ]
    if made.device is None:
        return out.table(rows, head, right=(2, 3, 4, 5))
    placed = [
        (*row[:2], _place_word(line), *row[2:]) for row, line in zip(rows, made.lines, strict=True)
    ]
    names = (*head[:2], "where", "size", *head[3:])
    return out.table(placed, names, right=(3, 4, 5, 6))


def _place_word(line: Line) -> str:
    return ON_GPU if line.where == ON_GPU else "memory"


def _nodes(made: Plan) -> str:
    """The table of nodes: what each holds and the team whose memory it is; one that is too small is red."""
    head = ("node", "needs", "free", "team", "")
    rows = []
    for need in made.nodes:
        teams = [_team_words(team) for team in made.host.teams if need.node in team.memory]
        words = "; ".join(teams) if len(teams) < 3 else f"{len(teams)} teams"
        short = "" if need.fits else "too little"
        rows.append((str(need.node), gib(need.need_bytes), gib(need.free_bytes), words, short))
    first, *lines = table(rows, head, right=(0, 1, 2)).splitlines()
    shown = zip(lines, made.nodes, strict=True)
    return "\n".join(
        [first, *(line if need.fits else out.style(line, "red") for line, need in shown)]
    )


def _team_words(team: NodeTeam) -> str:
    pins = f" on {numbered('CPU', team.cpus)}" if team.cpus else ""
    over = f", {numbered('node', team.memory)} together" if len(team.memory) > 1 else ""
    return f"{team.threads} thread{'s' if team.threads > 1 else ''}{pins}{over}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 5e-6 else ""


def _facts(made: Plan) -> str:
    host, speed, rates = made.host, made.speed, made.host.rates
    early = early_position(made.context)
    somewhere = "" if made.fits else ", with enough memory"
    rows = [
        ("Machine", f"{host.name}, {host.isa}"),
        ("Context", f"{made.context} positions"),
        (
            "Decode",
            f"{made.speed_words} after {early} tokens,"
            f" {made.rate(speed.decode_full)} at the end of the context{somewhere}",
        ),
        ("Prefill", f"{made.rate(speed.prefill)} tokens/s in steps of {_prefill_step(made)}"),
    ]
    if made.device:
        rows += device_rows(made.device)
    rows += [
        ("Experts", f"of {numbered('layer', each['layers'])} on node {each['node']}")
        for each in _experts_on(made)
    ]
    if made.traffic_bytes:
        what = "nodes" if len(made.nodes) == len(host.teams) else "teams"
        rows.append((f"Between {what}", _traffic_words(made)))
    words = (
        f"read {rates.read_bps / 1e9:.0f} GB/s, int8 {rates.int8_ops / 1e12:.2f} TOP/s,"
        f" bf16 {rates.bf16_ops / 1e12:.2f} TFLOP/s"
    )
    rows += [("Rates", words), *(("", why) for why in rates.basis.split("; "))]
    if made.device:
        rows += rate_rows(made.device.rates)
    if not made.measured:
        rows.append(("", "~ marks estimates: these rates are assumed"))
    return out.table(rows)


def _experts_on(made: Plan) -> list[dict[str, Any]]:
    """The nodes that hold the experts of whole layers, each with the numbers of these."""
    layers: dict[int, list[int]] = {}
    for layer, teams in made.experts_on.items():
        layers.setdefault(made.host.teams[teams[0]].memory[0], []).append(layer)
    return [{"node": node, "layers": numbers} for node, numbers in sorted(layers.items())]


def _prefill_step(made: Plan) -> int:
    """The number of tokens of the step whose speed is predicted."""
    return min(made.device.chunk if made.device else PREFILL_CHUNK, made.context)


def _traffic_words(made: Plan) -> str:
    words = f"{gib(made.traffic_bytes)} of activations per token"
    n = len(made.nodes)
    far = "half" if n == 2 else f"{n - 1}/{n}"
    cached = n > 1 and made.device is None  # else the cache is on the GPU
    return f"{words}, and {far} of the reads from the KV cache" if cached else words


def device_document(made: DevicePlan) -> dict[str, Any]:
    """Returns the GPUs' part of a plan as a document for --json: the bytes needed, the experts on GPUs and their
    expected hit rate, deferral, prefill settings, times in microseconds, and the GPU's rates.
    """
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
    """Returns the GPUs' part of a plan as rows of a table for people, each a label and a text: one for each GPU, how
    busy CPU and GPU are, and the reasons for the plan's decisions.
    """
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
    """Returns the GPU's rates and where they come from as rows of a table for people, each an empty
    label and a text.
    """
    words = (
        f"GPU read {rates.read_bps / 1e9:.0f} GB/s, bf16 {rates.bf16_ops / 1e12:.0f} TFLOP/s,"
        f" copies to it {rates.copy_bps / 1e9:.0f} GB/s"
    )
    return [("", words), *(("", why) for why in rates.basis.split("; "))]


def cost_words(cost: Cost) -> str:
    """Returns the effect of an option on the predicted speed and memory as text: "--defer 0: decode at 12 instead of 15
    tokens/s".
    """
    own, forced = predicted(cost.own), predicted(cost.forced)
    changes = {"memory": cost.memory_bytes, "GPU memory": cost.device_bytes}
    more = "".join(
        f", {gib(abs(size))} {'more' if size > 0 else 'less'} {what}"
        for what, size in changes.items()
        if size
    )
    return f"{cost.option}: {cost.what} at {forced} instead of {own} tokens/s{more}"
