"""`kt show NAME --experts`: a model's heat map, drawn as one row of shades per MoE layer.

A row shows all experts of a layer by number, several to a cell where there are more than columns. A
shade is a multiple of an even share, the same in all rows, so that layers can be compared.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from itertools import groupby
from textwrap import wrap
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ktcli.assembly import prepare
from ktcli.commands.view.bars import can_draw
from ktcli.errors import UsageError
from ktcli.models import build
from ktcli.ops.tensors import Role
from ktcli.output import out, safe
from ktcli.records import dataclass
from ktcli.store import heat
from ktcli.store.heat import Heat

SHARES = (0.1, 0.25, 0.5)  # of all experts: what a device could hold
HITS = (0.5, 0.9)  # of a layer's choices
HOTTEST = 3  # experts named per layer
# Choices per expert from which the picture no longer changes much: its noise is 1 in 6.
SETTLED = 32
WIDTH = 100  # columns where there is no terminal
WIDEST_CELL = 3  # columns of one expert

F64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shade:
    """The appearance of a cell whose share is at least `least` times the average."""

    least: float
    glyph: str
    ascii: str
    style: str
    words: str


SHADES = (
    Shade(0.0, "·", ".", "dim", "< 1/4"),
    Shade(0.25, "░", ":", "cyan", "< 3/4"),
    Shade(0.75, "▒", "+", "", "about 1"),
    Shade(1.5, "▓", "*", "yellow", "> 1.5"),
    Shade(3.0, "█", "#", "red", "> 3"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A heat map and its model.

    Attributes:
        name: the name of the model for people.
        again: its name for the command line.
        layers: the numbers of the MoE layers, in the order of the map's rows.
        heat: the map; it has no tokens if nothing was recorded yet.
    """

    name: str
    again: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    heat: Heat


def show_experts(model: str, config: Mapping[str, Any]) -> None:
    """Prints a heat map of how often chats chose each expert of each MoE layer, for the conversion that `kt chat MODEL`
    would use.

    Raises:
        UsageError: the model has no experts.
        KtError: kt cannot build it.
    """
    built = build(config)
    spec = built.spec
    if not spec.moe_layers:
        raise UsageError(f"{model} has no experts: it is a dense model")
    layers = tuple(sorted({t.layer or 0 for t in built.tensors if t.role is Role.EXPERTS}))
    ready = prepare.converted(model)
    shape = (spec.moe_layers, spec.experts)
    found = heat.read(ready.pack, shape, out.warn) if ready else None
    found = found or Heat(np.zeros(shape, np.int64), 0)
    name = ready.name if ready else model
    recorded = Recorded(name, model, layers, spec.experts, spec.top_k, found)
    out.result(document(recorded), lambda: render(recorded, Canvas.of(sys.stdout)))


def document(recorded: Recorded) -> dict[str, Any]:
    """Returns the record of chosen experts as the document for --json: "layers" has the counts of each MoE layer by
    expert, "hit_rates" the share of choices that fell on the most chosen 10, 25 and 50 % of the experts.
    """
    known = recorded.heat
    return {
        "name": recorded.name,
        "experts": recorded.experts,
        "experts_per_token": recorded.top_k,
        "tokens": known.tokens,
        "hit_rates": [{"share": share, "hit_rate": known.hit_rate(share)} for share in SHARES],
        "layers": [
            {"layer": layer, "counts": counts}
            for layer, counts in zip(recorded.layers, known.counts.tolist(), strict=True)
        ],
    }


@dataclass(frozen=True, slots=True)
class Canvas:
    """The terminal or file that is drawn on.

    Attributes:
        stream: the stream, which decides on colours.
        width: the number of columns.
        plain: whether only ASCII can be written.
    """

    stream: TextIO
    width: int
    plain: bool

    @classmethod
    def of(cls, stream: TextIO) -> Canvas:
        """Returns the canvas for a stream: as wide as the terminal, and limited to ASCII unless the stream can show
        block characters, see `can_draw`.
        """
        columns = shutil.get_terminal_size((WIDTH, 24)).columns
        return cls(stream, columns, plain=not can_draw(stream))

    def paint(self, shade: Shade, cells: int = 1) -> str:
        """Returns the text that draws `cells` cells of a heat map in one shade, with colour if the
        stream supports it.
        """
        text = (shade.ascii if self.plain else shade.glyph) * cells
        return out.style(text, shade.style, self.stream) if shade.style else text


def render(recorded: Recorded, canvas: Canvas) -> str:
    """Returns the heat map of chosen experts as text: a row of shaded cells for each MoE layer, a legend and a summary;
    a hint instead if nothing was recorded yet.
    """
    title = safe(recorded.name)
    if not recorded.heat.tokens:
        return (
            f"kt has not yet recorded which experts {title} uses.\n"
            f"Talk to it: kt chat {safe(recorded.again)}"
        )
    said = (
        f"{title}: which of {recorded.experts} experts were chosen in chats of"
        f" {recorded.heat.tokens:,} tokens, {recorded.top_k} per token and layer"
    )
    lines = [
        *wrap(said, canvas.width),
        "",
        *_rows(recorded, canvas),
        "",
        *_legend(canvas),
        *(line for words in _summary(recorded) for line in wrap(words, canvas.width)),
    ]
    return "\n".join(lines)


def _legend(canvas: Canvas) -> list[str]:
    """The lines that say what each shade means, as wide as the canvas at most."""
    lines = ["Shading, relative to an even distribution:"]
    used = len(lines[0])
    for shade in SHADES:
        words = f"{canvas.paint(shade)} {shade.words}"
        columns = 4 + len(shade.words)  # two spaces before, the cell, one after
        if used + columns <= canvas.width:
            lines[-1] += f"  {words}"
            used += columns
        else:
            lines.append(f"  {words}")
            used = columns
    return lines


def _rows(recorded: Recorded, canvas: Canvas) -> list[str]:
    """The heading and a row per layer."""
    known = recorded.heat
    needed = [known.needed(hits) for hits in HITS]
    digits = len(str(recorded.experts))
    tail = [f"{hits:>{max(4, digits)}.0%}" for hits in HITS]
    beside = len("layer") + 2 + sum(2 + len(cell) for cell in tail) + 2 + HOTTEST * (digits + 1)
    layout = HeatMapLayout.of(recorded.experts, canvas.width - beside)
    last = str(recorded.experts - 1)
    scale = "0" + last.rjust(layout.columns - 1) if layout.columns > len(last) + 1 else ""
    lines = ["  ".join(["layer", scale.ljust(layout.columns), *tail, "hottest"])]
    for i, layer in enumerate(recorded.layers):
        counts = known.counts[i]
        hottest = [int(e) for e in np.argsort(-counts, kind="stable")[:HOTTEST] if counts[e]]
        cells = [f"{column[i]:>{len(cell)}}" for column, cell in zip(needed, tail, strict=True)]
        names = " ".join(f"{e:>{digits}}" for e in hottest)
        lines.append("  ".join([f"{layer:>5}", _strip(counts, layout, canvas), *cells, names]))
    return [line.rstrip() for line in lines]


@dataclass(frozen=True, slots=True)
class HeatMapLayout:
    """The widths of the cells in the rows of a heat map.

    Attributes:
        per_cell: the experts of a cell; the last may have fewer.
        cell: the columns of a cell.
        columns: the columns of the row.
    """

    per_cell: int
    cell: int
    columns: int

    @classmethod
    def of(cls, experts: int, room: int) -> HeatMapLayout:
        """Returns the layout of a heat map for `experts` experts in at most `room` columns (at least 8): the experts
        per cell and the columns per cell, the same for all cells.
        """
        per_cell = -(-experts // max(8, room))
        cells = -(-experts // per_cell)
        cell = max(1, min(WIDEST_CELL, room // cells)) if per_cell == 1 else 1
        return cls(per_cell, cell, cells * cell)


def even_shares(counts: NDArray[np.int64], per_cell: int) -> F64Array:
    """Returns for each cell of a heat map the mean count of its experts, divided by the mean over all experts, f64
    [cells].

    Args:
        counts: how often each expert of a layer was chosen, int64 [experts].
        per_cell: the experts of a cell; the last may have fewer.
    """
    starts = np.arange(0, counts.size, per_cell)
    sizes = np.diff(np.append(starts, counts.size))
    shares: F64Array = np.add.reduceat(counts, starts) / sizes
    return shares * counts.size / max(1, int(counts.sum()))


def _strip(counts: NDArray[np.int64], layout: HeatMapLayout, canvas: Canvas) -> str:
    """The cells of one layer; equal neighbours are painted at once."""
    least = [shade.least for shade in SHADES]
    levels = np.searchsorted(least, even_shares(counts, layout.per_cell), side="right") - 1
    return "".join(
        canvas.paint(SHADES[level], layout.cell * len(list(run)))
        for level, run in groupby(levels.tolist())
    )


def _summary(recorded: Recorded) -> list[str]:
    """The lines that say what the columns mean, and what a device that holds some of the experts would catch."""
    known = recorded.heat
    rates = ", ".join(f"{share:.0%} take {known.hit_rate(share):.0%}" for share in SHARES)
    shares = [f"{share:.0%}" for share in SHARES]
    lines = [
        f"{HITS[0]:.0%}, {HITS[1]:.0%}: the number of experts that receive this share of the layer's choices.",
        f"The best experts: {rates} of the choices"
        f" (evenly used: {', '.join(shares[:-1])} and {shares[-1]}).",
    ]
    each = known.tokens * recorded.top_k / recorded.experts
    if each < SETTLED:
        enough = SETTLED * recorded.experts // recorded.top_k
        lines.append(f"This is a small sample: the picture settles after about {enough:,} tokens.")
    return lines
