"""Shows what a conversion lost, according to its manifest: by kind of tensor, and layer by layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ktcli.errors import KtError
from ktcli.models import build
from ktcli.output import out, safe
from ktcli.weights.formats import INT8_BEFORE
from ktcli.weights.pack import Pack, weight_files
from ktcli.weights.recipe import TensorKind, format_of_kind

WORDS = {TensorKind.EXPERTS: "experts", TensorKind.DOWN: "experts' down", TensorKind.DENSE: "dense"}

_HASH = re.compile("[0-9a-f]{64}")
_HASH_DIGITS = 12  # of a hash, for people
OUTDATED = "  int8 is more precise in this version of kt"
AGAIN = ": to convert it again, run kt rm {name}, then kt convert {name}"


def calibrated_by(identity: str) -> str:
    """Returns the phrase "calibrated by …" for the calibration in a manifest, with short hashes."""
    return f"calibrated by {_HASH.sub(lambda found: found[0][:_HASH_DIGITS], safe(identity))}"


def error_report(path: Path) -> dict[str, Any] | None:
    """Returns a document about the pack in a folder: its number formats and calibration, the relative errors of the
    whole model by kind of tensor, errors and cosines of each file, and whether its int8 format is an outdated one; None
    if the pack cannot be read.
    """
    from ktcli.weights.losses import overall

    try:
        pack = Pack.open(path)
        whole = overall(weight_files(build(pack.config).tensors, pack.recipe), pack.manifest)
    except KtError:
        return None
    chosen = [format_of_kind(kind, pack.recipe) for kind in WORDS]
    formats = {kind.value: fmt.name for kind, fmt in zip(WORDS, chosen, strict=True)}
    files = [
        {
            "file": record.name,
            "error": dict(record.error),
            "cosine": dict(record.cosine),
            **({"weighted": dict(record.weighted)} if record.weighted else {}),
        }
        for record in pack.manifest.files
    ]
    error = {kind.value: whole[kind.value] for kind in WORDS if kind.value in whole}
    outdated = INT8_BEFORE in (pack.recipe.experts, pack.recipe.dense)
    return {
        "formats": formats,
        "calibration": pack.manifest.calibration or None,
        "error": error,
        "files": files,
        "outdated": outdated,
    }


def render_report(
    name: str, report: dict[str, Any], *, layers: bool = False, again: bool = False
) -> str:
    """Returns a report of `error_report` as text, a table with a line per kind of tensor: the error over all layers,
    and the worst layer. Older packs have no cosines.

    Args:
        layers: whether a line per layer follows.
        again: whether to say how a pack in an outdated format is converted again.
    """
    rows = [("", "format", "error (rms)", "worst layer", "lowest cosine")]
    for kind, words in WORDS.items():
        found = [
            (row["error"][kind.value], row) for row in report["files"] if kind.value in row["error"]
        ]
        if not found:
            continue
        worst, at = max(found, key=lambda pair: pair[0])
        cosines = [row["cosine"][kind.value] for _, row in found if kind.value in row["cosine"]]
        least = f"{min(cosines):.5f}" if cosines else ""
        whole, fmt = report["error"][kind.value], report["formats"][kind.value]
        rows.append(
            (f"  {words}", fmt, f"{whole:.2%}", f"{worst:.2%} ({_layer(at['file'])})", least)
        )
    text = f"{name}:\n{out.table(rows)}"
    if report["calibration"]:
        text += f"\n  {calibrated_by(report['calibration'])}"
    if report["outdated"]:
        text += f"\n{OUTDATED}{AGAIN.format(name=name) if again else '.'}"
    return f"{text}\n\n{_layers(report)}" if layers else text


def _layers(report: dict[str, Any]) -> str:
    """The table of errors by layer, of those weighted by importance, and of cosines between the outputs of its matrices
    and of the checkpoint's."""
    there = [kind for kind in WORDS if any(kind.value in row["error"] for row in report["files"])]
    columns = {"error": "{:.2%}", "weighted": "{:.2%}", "cosine": "{:.5f}"}
    if not any(row.get("weighted") for row in report["files"]):
        del columns["weighted"]
    names = {"weighted": "by importance", "cosine": "cosine"}
    head = ("  layer", *(names.get(key, WORDS[kind]) for kind in there for key in columns))
    rows = []
    for row in report["files"]:
        cells = [f"  {_layer(row['file'])}"]
        for kind in there:
            for key, form in columns.items():
                value = row.get(key, {}).get(kind.value)
                cells.append("" if value is None else form.format(value))
        rows.append(cells)
    return out.table(rows, head, right=range(1, len(head)))


def _layer(file: str) -> str:
    """The number of a file's layer; "outer" if it belongs to none."""
    return file.removesuffix(".safetensors").removeprefix("layer-").lstrip("0") or "0"
