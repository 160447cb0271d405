"""What was measured, as rows for a JSON file and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.peers.arithmetic import Series, layer_ms, layer_ratios
from benchmarks.peers.rows import Pairing, Work
from ktcli.measure.clock import NOISY_SHARE
from ktcli.output import table

Row = dict[str, Any]


def row(pairing: Pairing, work: Work, series: Sequence[Series]) -> Row:
    """The figures of one work; `series` are the large cut's and, for a prompt, the small cut's."""
    large = series[0]
    goal = pairing.goals[work]
    found: Row = {
        "work": work.kind,
        "n_tokens": work.n_tokens,
        "streams": work.streams,
        "model": pairing.model,
        "layers": pairing.layers[0],
        "format": pairing.kt.name,
        "peer": pairing.engine,
        "peer_format": pairing.mix,
        "ratio": large.ratio,
        "ratio_min": min(large.ratios),
        "ratio_max": max(large.ratios),
        "goal": goal,
        "reached": None if goal is None else large.ratio >= goal,
        "tok_s": work.all_tokens / median(large.kt_s),
        "peer_tok_s": work.all_tokens / median(large.peer_s),
        "runs_s": [{"peer": s.peer_s, "kt": s.kt_s} for s in series],
    }
    if len(series) > 1:
        small = series[1]
        more = pairing.layers[0] - pairing.layers[1]
        ratios = layer_ratios(large, small)
        found["layers_small"] = pairing.layers[1]
        found["layer_ratio"] = median(ratios) if ratios else None
        found["layer_ms"] = layer_ms(large.kt_s, small.kt_s, more)
        found["peer_layer_ms"] = layer_ms(large.peer_s, small.peer_s, more)
    return found


def noise(others_share: float, idle_share: float) -> Row:
    """Who else used the cores: other programs, and engines that were waiting for their turn."""
    return {
        "noisy": others_share > NOISY_SHARE,
        "others_percent": 100 * others_share,
        "waiting_engines_cores": idle_share,
    }


def text(rows: Sequence[Row]) -> str:
    """The comparison with whole engines; nothing without rows."""
    if not rows:
        return ""
    head = ("work", "model", "kt", "peer", "bits", "kt tok/s", "peer tok/s", "ratio", "per layer")
    lines = [
        (
            Work(row["work"], row["n_tokens"], streams=row["streams"]).name,
            f"{row['model']}, {row['layers']} layers",
            row["format"],
            f"{row['peer']} {row['peer_format']}",
            f"{row['bits']:.2f} / {row['peer_bits']:.2f}",
            f"{row['tok_s']:.1f}",
            f"{row['peer_tok_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['layer_ratio']:.2f}" if row.get("layer_ratio") else "",
            verdict(row),
        )
        for row in rows
    ]
    return table(lines, (*head, "goal"), right=(4, 5, 6, 7, 8))


def verdict(row: Mapping[str, Any]) -> str:
    """Goal and whether it was reached; a noisy row says so."""
    words = []
    if row["goal"] is not None:
        words.append(f"{row['goal']:.2f} {'reached' if row['reached'] else 'missed'}")
    if row["noisy"]:
        words.append("noisy")
    return ", ".join(words)


def moe_text(rows: Sequence[Row]) -> str:
    """kt-kernel's experts of one layer; nothing without rows."""
    if not rows:
        return ""
    lines = [
        (
            f"{row['work']} {row['n_tokens']}",
            "x".join(map(str, row["shape"])),
            row["format"],
            f"{row['ms']:.2f}",
            f"{row['gb_s']:.1f}" if row["work"] == "decode" else "",
            f"{row['gop_s']:.0f}" if row["work"] == "prefill" else "",
            "noisy" if row["noisy"] else "",
        )
        for row in rows
    ]
    head = ("work", "H x I x E x K", "kt-kernel", "ms", "GB/s", "GOP/s", "")
    return table(lines, head, right=(3, 4, 5))
