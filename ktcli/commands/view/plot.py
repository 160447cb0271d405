"""Draws what `kt eval` found: a row for each way of running a model, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktcli.commands.view.quality import Found
from ktcli.measure.intervals import Interval

_COLOUR = "#2f6f9f"


def draw(found: Found, path: Path) -> None:
    """Writes a PNG or SVG file, as its ending says; the same figures give the same file.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "kt", "svg.fonttype": "none"})
    panels = _panels(found)
    tallest = max(len(rows) for _, rows in panels)
    figure = Figure(figsize=(1.5 + 4.5 * len(panels), 1.7 + 0.4 * tallest), layout="constrained")
    for axis, (title, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _rows(axis, title, rows)
    first = _plain(found.results[0].way.label)
    figure.suptitle(
        f"{_plain(found.passage.name)}, {found.tokens:,} tokens"
        + (f"; against {first}" if len(found.results) > 1 else ""),
        fontsize=9,
    )
    svg = path.suffix.lower() == ".svg"
    figure.savefig(
        path, format="svg" if svg else "png", dpi=150, metadata={"Date": None} if svg else None
    )


Panel = tuple[str, list[tuple[str, Interval]]]


def _panels(found: Found) -> Sequence[Panel]:
    """The panels to draw: likelihoods where there is one way only, else the losses of the others."""
    pairs = [(result.way.label, result.against) for result in found.results if result.against]
    if not pairs:
        return [("nats per token", [(result.way.label, result.nll) for result in found.results])]
    lost = [(label, against.nll) for label, against in pairs]
    apart = [(label, against.kl) for label, against in pairs if against.kl is not None]
    panels: list[Panel] = [("nats per token lost", lost)]
    return [*panels, ("KL divergence, nats per token", apart)] if apart else panels


def _rows(axis: Any, title: str, rows: list[tuple[str, Interval]]) -> None:
    for place, (_, value) in enumerate(rows):
        around = [[value.mean - value.low], [value.high - value.mean]]
        axis.errorbar(value.mean, place, xerr=around, fmt="o", color=_COLOUR, capsize=3)
    axis.set_yticks(range(len(rows)), [_plain(label) for label, _ in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    if len(rows) > 1 or "lost" in title or "KL" in title:
        axis.axvline(0.0, color="grey", linewidth=0.8)
    axis.set_xlabel(f"{title} (bars: 95 % intervals)", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)


def _plain(text: str) -> str:
    """Makes a foreign name harmless: no formulas, and nothing that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")[:120]
