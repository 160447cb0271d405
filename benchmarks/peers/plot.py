"""A bar per row: how many times as fast as the peer kt is.

    python -m benchmarks.peers.plot RESULTS_JSON PICTURE

Runs in the private environment, which has matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_KT, _GOAL = "#2f6f9f", "#b03a2e"


def draw(document: dict[str, Any], path: Path) -> None:
    """Decode and prefill side by side, each with its own scale."""
    rows = document["rows"]
    kinds = [kind for kind in ("decode", "prefill") if any(r["work"] == kind for r in rows)]
    tallest = max(sum(r["work"] == kind for r in rows) for kind in kinds)
    matplotlib.rcParams["svg.hashsalt"] = "kt"  # same results, same file
    figure = Figure(figsize=(7.5 * len(kinds), 1.6 + 0.36 * tallest))
    axes = figure.subplots(1, len(kinds), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        _bars(axis, [row for row in rows if row["work"] == kind], kind)
    machine = document["machine"]
    figure.suptitle(f"kt against other engines: {machine['cpu']}, {machine['cores']} cores", y=0.99)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axis: Any, rows: list[dict[str, Any]], kind: str) -> None:
    for place, row in enumerate(rows):
        low, high = row["ratio"] - row["ratio_min"], row["ratio_max"] - row["ratio"]
        axis.barh(place, row["ratio"], color=_KT, alpha=0.5 if row["noisy"] else 1.0, height=0.6)
        axis.errorbar(row["ratio"], place, xerr=[[low], [high]], color="black", linewidth=0.8)
        if row["goal"] is not None:
            axis.plot([row["goal"]] * 2, [place - 0.4, place + 0.4], color=_GOAL, linewidth=2)
    labels = [
        f"{row['model']} {row['format']}, {row['n_tokens']} tokens\n{row['peer']} {row['peer_format']}"
        for row in rows
    ]
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.axvline(1.0, color="grey", linewidth=0.8)
    axis.set_xlim(left=0)
    axis.set_xlabel(f"{kind}: kt's speed in multiples of the peer's (red: goal, pale: noisy)")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
