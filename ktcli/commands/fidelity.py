"""What a conversion lost, as its manifest says: layer by layer for --json, by kind of tensor for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ktcli.errors import KtError
from ktcli.output import table
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import TensorKind, format_of_kind

WORDS = {
    TensorKind.EXPERTS: "experts",
    TensorKind.DOWN: "experts' down",
    TensorKind.DENSE: "dense",
}


def error_report(path: Path) -> dict[str, Any] | None:
    """Number formats, and by file the errors and cosines of each kind; None: the pack cannot be read."""
    try:
        pack = Pack.open(path)
    except KtError:
        return None
    formats = {kind.value: format_of_kind(kind, pack.recipe).name for kind in WORDS}
    files = [
        {"file": record.name, "error": dict(record.error), "cosine": dict(record.cosine)}
        for record in pack.manifest.files
    ]
    return {"formats": formats, "files": files}


def render_report(name: str, report: dict[str, Any]) -> str:
    """A line per kind: over all layers, and its worst one. Packs of before have no cosines."""
    rows = [("", "format", "error (rms)", "worst layer", "outputs' least cosine")]
    for kind, words in WORDS.items():
        found = [(row["error"].get(kind.value), row) for row in report["files"]]
        there = [(error, row) for error, row in found if error is not None]
        if not there:
            continue
        mean = math.sqrt(sum(error * error for error, _ in there) / len(there))
        worst, at = max(there, key=lambda pair: pair[0])
        cosines = [row["cosine"][kind.value] for _, row in there if kind.value in row["cosine"]]
        least = f"{min(cosines):.5f}" if cosines else ""
        layer = at["file"].removesuffix(".safetensors").removeprefix("layer-").lstrip("0") or "0"
        fmt = report["formats"][kind.value]
        rows.append((f"  {words}", fmt, f"{mean:.2%}", f"{worst:.2%} ({layer})", least))
    return f"{name}:\n{table(rows)}"
