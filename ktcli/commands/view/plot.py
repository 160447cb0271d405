"""Draws the results of `kt eval`, one row per model variant with its 95 % interval: as text and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path
from xml.etree import ElementTree as xml

from ktcli.commands.view.picture import COLOUR, line, new_picture, step_of, words, write
from ktcli.commands.view.quality import Found
from ktcli.measure.intervals import Interval
from ktcli.output import safe
from ktcli.records import dataclass

_MOST_LABEL = 60  # characters
_LEAST_BAR, _MOST_BAR = 20, 60  # columns of the drawing in text
# Pixels of the picture.
_LABEL, _ROW, _PANEL, _TOP, _BOTTOM, _MARGIN = 7, 28, 340, 64, 52, 16


@dataclass(frozen=True, slots=True)
class Chart:
    """Intervals on one axis.

    Attributes:
        title: what the axis says.
        rows: each interval with its label.
        low, high: the ends of the axis.
        ticks: the values that are written below it.
    """

    title: str
    rows: tuple[tuple[str, Interval], ...]
    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, title: str, rows: Sequence[tuple[str, Interval]], *, zero: bool) -> Chart:
        """Returns a chart whose axis has room for all intervals.

        Args:
            zero: whether the axis shows 0.
        """
        ends = [end for _, value in rows for end in (value.low, value.high)]
        low, high = min([*ends, *[0.0] * zero]), max([*ends, *[0.0] * zero])
        step = step_of((high - low) or abs(high) or 1.0)
        first, last = floor(low / step), ceil(high / step)
        last += first == last
        ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
        named = tuple((safe(label)[:_MOST_LABEL], value) for label, value in rows)
        return cls(title, named, ticks[0], ticks[-1], ticks)

    def share(self, value: float) -> float:
        """Returns the position of a value on the axis, 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def charts(found: Found) -> list[Chart]:
    """Returns the charts of a result: likelihoods where there is one variant only, else the losses of the others."""
    pairs = [(result.variant.label, result.against) for result in found.results if result.against]
    if not pairs:
        alone = [(result.variant.label, result.nll) for result in found.results]
        return [Chart.of("nats per token", alone, zero=False)]
    lost = [(label, against.nll) for label, against in pairs]
    apart = [(label, against.kl) for label, against in pairs if against.kl is not None]
    drawn = [Chart.of("nats per token lost", lost, zero=True)]
    return [*drawn, Chart.of("KL divergence, nats per token", apart, zero=True)] if apart else drawn


def drawn(found: Found, columns: int) -> str:
    """Returns the charts of the differences as text for a terminal of so many columns; empty without differences, or
    room."""
    if len(found.results) < 2:
        return ""
    return "\n\n".join(filter(None, (_text(chart, columns) for chart in charts(found))))


def draw(found: Found, path: Path) -> None:
    """Writes an SVG file; the same figures give the same file.

    Raises:
        OSError: it cannot be written.
    """
    panels = charts(found)
    label = _LABEL * max(len(name) for chart in panels for name, _ in chart.rows)
    width = 2 * _MARGIN + len(panels) * (label + _PANEL) + (len(panels) - 1) * 2 * _MARGIN
    height = _TOP + _ROW * max(len(chart.rows) for chart in panels) + _BOTTOM
    picture = new_picture(width, height)
    first = safe(found.results[0].variant.label)[:_MOST_LABEL]
    title = f"{safe(found.passage.name)[:_MOST_LABEL]}, {found.tokens:,} tokens" + (
        f"; against {first}" if len(found.results) > 1 else ""
    )
    words(picture, title, width / 2, 24, size=14)
    for i, chart in enumerate(panels):
        left = _MARGIN + label + i * (label + _PANEL + 2 * _MARGIN)
        _panel(picture, chart, left, height - _BOTTOM)
    write(picture, path)


# --- as text ----------------------------------------------------------------------------------------


def _text(chart: Chart, columns: int) -> str:
    """One chart: ├──●──┤ for each interval, and the ends of the axis below."""
    label = max(len(name) for name, _ in chart.rows)
    width = min(columns - label - 3, _MOST_BAR)
    if width < _LEAST_BAR:
        return ""
    lines = [chart.title]
    for name, value in chart.rows:
        bar = [" "] * width
        low, at, high = (
            min(round(chart.share(x) * (width - 1)), width - 1)
            for x in (value.low, value.mean, value.high)
        )
        if chart.low <= 0.0 <= chart.high:
            bar[round(chart.share(0.0) * (width - 1))] = "┊"
        for place in range(low, high + 1):
            bar[place] = "─"
        bar[low], bar[high] = "├", "┤"
        bar[at] = "●"
        lines.append(f"{name:<{label}}  {''.join(bar).rstrip()}")
    ends = f"{chart.low:g}", f"{chart.high:g}"
    axis = ends[0] + ends[1].rjust(width - len(ends[0]))
    return "\n".join([*lines, f"{'':<{label}}  {axis}"])


# --- as SVG -----------------------------------------------------------------------------------------


def _panel(picture: xml.Element, chart: Chart, left: float, bottom: float) -> None:
    def x(value: float) -> float:
        return left + chart.share(value) * _PANEL

    line(picture, (left, bottom), (left + _PANEL, bottom))
    for tick in chart.ticks:
        line(picture, (x(tick), bottom), (x(tick), bottom + 4))
        words(picture, f"{tick:g}", x(tick), bottom + 16, size=11)
    if chart.low <= 0.0 <= chart.high:
        line(picture, (x(0.0), _TOP - _ROW / 2), (x(0.0), bottom))
    words(picture, f"{chart.title} (bars: 95 % intervals)", left + _PANEL / 2, bottom + 38, size=12)
    for i, (name, value) in enumerate(chart.rows):
        y = _TOP + _ROW * (i + 0.25)
        words(picture, name, left - 8, y + 4, size=11, anchor="end")
        line(picture, (x(value.low), y), (x(value.high), y), COLOUR)
        for end in (value.low, value.high):
            line(picture, (x(end), y - 4), (x(end), y + 4), COLOUR)
        xml.SubElement(
            picture, "circle", cx=f"{x(value.mean):.1f}", cy=f"{y:.1f}", r="4", fill=COLOUR
        )
