"""Shows the results of `kt eval`: as intervals, as a document, in words, and drawn, one row per model variant, as text
and as SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from math import ceil, floor
from pathlib import Path
from textwrap import wrap
from typing import Any
from xml.etree import ElementTree as xml

from ktcli.assembly.variants import EvalRequest, SplitPart, Variant
from ktcli.commands.view import picture as svg
from ktcli.commands.view.fidelity import calibrated_by
from ktcli.measure.evaluate import Difference, Scores, difference
from ktcli.measure.intervals import LEAST_VALUES, MOST_BLOCKS, Interval, interval
from ktcli.output import out, safe
from ktcli.records import dataclass
from ktcli.text.passage import Passage, Reading

METHOD = (
    f"95 % intervals: Student's t on the means of up to {MOST_BLOCKS} blocks of consecutive tokens"
    " of equal length; differences are taken token by token first"
)


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The result of one variant of an evaluation.

    Attributes:
        tokens: the number of tokens that it predicted.
        nll: the negative log-likelihood, nats per token.
        against: the difference from the first variant, in pairs of tokens; None: this is the first.
    """

    variant: Variant
    tokens: int
    nll: Interval
    against: Difference | None


@dataclass(frozen=True, slots=True)
class Found:
    """The results of all variants of an evaluation, and the text.

    Attributes:
        complete: whether all variants read all of the text.
    """

    results: tuple[VariantResult, ...]
    passage: Passage
    reading: Reading
    asked: EvalRequest
    complete: bool

    @classmethod
    def of(
        cls,
        variants: Sequence[Variant],
        scores: Sequence[Scores],
        passage: Passage,
        reading: Reading,
        asked: EvalRequest,
        complete: bool,
    ) -> Found:
        """Returns the results of an evaluation: for each variant that predicted at least LEAST_VALUES (256) tokens the
        mean negative log-likelihood with its interval, and for all but the first the difference from the first.
        """
        results = tuple(
            VariantResult(
                variant,
                len(each.nll),
                interval(each.nll),
                difference(each, scores[0]) if i else None,
            )
            for i, (variant, each) in enumerate(zip(variants, scores, strict=True))
            if len(each.nll) >= LEAST_VALUES
        )
        return cls(results, passage, reading, asked, complete)

    @property
    def tokens(self) -> int:
        """The smallest number of tokens that a variant predicted; 0 without results."""
        return min((result.tokens for result in self.results), default=0)


# --- for --json -------------------------------------------------------------------------------------


def document(found: Found) -> dict[str, Any]:
    """Returns the results of an evaluation on a text as the document for --json: the text, and for each variant
    likelihood, perplexity and difference from the first. Figures are in nats per token unless their name says
    otherwise.
    """
    text = found.passage.text.encode()
    return {
        "text": {
            "name": found.passage.name,
            "sha256": sha256(text).hexdigest(),
            "tokens": len(found.reading.ids),
            "bytes_per_token": found.reading.bytes_per_token,
        },
        "context": found.asked.length,
        "stride": found.asked.stride,
        "predicted_tokens": found.tokens,
        "complete": found.complete,
        "method": METHOD,
        "first": found.results[0].variant.label,
        "results": [_row(result, found.reading) for result in found.results],
        **({"split": _splits(found)} if found.asked.split else {}),
    }


def _splits(found: Found) -> list[dict[str, Any]]:
    """The parts of each conversion's loss, one document for each conversion and cache."""
    return [
        {
            "conversion": whole.variant.conversion,
            "kv": whole.variant.cache,
            **{
                str(each.variant.part): _part(each)
                for each in found.results
                if each.variant.beside(whole.variant)
            },
        }
        for whole in found.results
        if whole.variant.part is SplitPart.TOGETHER
    ]


def _part(result: VariantResult) -> dict[str, Any]:
    against = result.against
    return {"nll": _figures(result.nll)} if against is None else _differences(against)


def _row(result: VariantResult, reading: Reading) -> dict[str, Any]:
    variant, against = result.variant, result.against
    row: dict[str, Any] = {
        "name": variant.label,
        "model": variant.ready.name,
        "experts": variant.recipe.experts_name,
        "dense": variant.recipe.dense.name,
        "calibration": variant.calibration or None,
        "defer": variant.defer,
        "kv": variant.cache,
        "part": variant.part,
        "nll": _figures(result.nll),
        "perplexity": _figures(result.nll.exp()),
        "nll_per_byte": _figures(result.nll.scaled(1 / reading.bytes_per_token)),
    }
    if against is not None:
        row["against_first"] = _differences(against)
    return row


def _differences(against: Difference) -> dict[str, Any]:
    return {
        "delta_nll": _figures(against.nll),
        "kl": None if against.kl is None else _figures(against.kl),
        "same_top_token": _figures(against.same_best),
    }


def _figures(value: Interval) -> dict[str, float]:
    return {"mean": value.mean, "low": value.low, "high": value.high}


# --- for people -------------------------------------------------------------------------------------


def words(found: Found) -> str:
    """Returns the results of an evaluation on a text as text: a table of likelihood and perplexity of each variant, one
    of differences from the first, and what the intervals mean.
    """
    asked, reading = found.asked, found.reading
    width = min(80, out.width or 80)
    lines = wrap(
        f"{safe(found.passage.name)}: {found.tokens:,} tokens in windows of {asked.length:,},"
        f" {reading.bytes_per_token:.2f} bytes per token",
        out.width or 1000,
    )
    first, *others = found.results
    rows = [
        (
            result.variant.label,
            _shown(result.nll),
            _perplexity(result.nll.exp().mean),
            f"{result.nll.mean / reading.bytes_per_token:.4f}",
        )
        for result in found.results
    ]
    head = ("", "nats per token", "perplexity", "nats per byte")
    lines += ["", out.table(rows, head, right=(1, 2, 3))]
    if others:
        rows = [
            (result.variant.label, *_compared(result.against))
            for result in others
            if result.against
        ]
        head = (f"against {safe(first.variant.label)}", "nats per token", "KL", "same top token")
        lines += ["", out.table(rows, head, right=(1, 2, 3))]
    calibrated = {
        r.variant.conversion: r.variant.calibration for r in found.results if r.variant.calibration
    }
    for name, identity in calibrated.items():
        lines += ["", *wrap(f"{safe(name)} was {calibrated_by(identity)}", width)]
    return "\n".join([*lines, "", *wrap(f"± {METHOD}", width)])


def _compared(against: Difference) -> tuple[str, str, str]:
    same = against.same_best.scaled(100)
    return (
        _shown(against.nll, "+.4f"),
        "-" if against.kl is None else _shown(against.kl),
        f"{same.mean:.2f} ± {same.half:.2f} %",
    )


def _perplexity(value: float) -> str:
    return f"{value:,.3f}" if value < 1e6 else f"{value:.3e}"


def _shown(value: Interval, form: str = ".4f") -> str:
    return f"{value.mean:{form}} ± {value.half:.4f}"


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
        """Returns a chart whose axis and ticks have room for all intervals.

        Args:
            rows: each interval with its label.
            zero: whether the axis shows 0.
        """
        ends = [end for _, value in rows for end in (value.low, value.high)]
        low, high = min([*ends, *[0.0] * zero]), max([*ends, *[0.0] * zero])
        step = svg.step_of((high - low) or abs(high) or 1.0)
        first, last = floor(low / step), ceil(high / step)
        last += first == last
        ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
        named = tuple((safe(label)[:_MOST_LABEL], value) for label, value in rows)
        return cls(title, named, ticks[0], ticks[-1], ticks)

    def share(self, value: float) -> float:
        """Returns the position of a value on the axis of the chart: 0 at its low end, 1 at its high end."""
        return (value - self.low) / (self.high - self.low)


def charts(found: Found) -> list[Chart]:
    """Returns the charts for the results of an evaluation: one of the likelihoods where there is one variant only, else
    of the losses against the first variant, and of their KL divergences if known.
    """
    pairs = [(result.variant.label, result.against) for result in found.results if result.against]
    if not pairs:
        alone = [(result.variant.label, result.nll) for result in found.results]
        return [Chart.of("nats per token", alone, zero=False)]
    lost = [(label, against.nll) for label, against in pairs]
    apart = [(label, against.kl) for label, against in pairs if against.kl is not None]
    drawn = [Chart.of("nats per token lost", lost, zero=True)]
    return [*drawn, Chart.of("KL divergence, nats per token", apart, zero=True)] if apart else drawn


def drawn(found: Found, columns: int) -> str:
    """Returns the charts of the differences from the first variant as text for a terminal of `columns` columns; empty
    if there are no differences, or no room.
    """
    if len(found.results) < 2:
        return ""
    return "\n\n".join(filter(None, (_text(chart, columns) for chart in charts(found))))


def draw(found: Found, path: Path) -> None:
    """Writes the charts of an evaluation to an SVG file; the same figures give the same file.

    Raises:
        OSError: the file cannot be written.
    """
    panels = charts(found)
    label = _LABEL * max(len(name) for chart in panels for name, _ in chart.rows)
    width = 2 * _MARGIN + len(panels) * (label + _PANEL) + (len(panels) - 1) * 2 * _MARGIN
    height = _TOP + _ROW * max(len(chart.rows) for chart in panels) + _BOTTOM
    picture = svg.new_picture(width, height)
    first = safe(found.results[0].variant.label)[:_MOST_LABEL]
    title = f"{safe(found.passage.name)[:_MOST_LABEL]}, {found.tokens:,} tokens" + (
        f"; against {first}" if len(found.results) > 1 else ""
    )
    svg.words(picture, title, width / 2, 24, size=14)
    for i, chart in enumerate(panels):
        left = _MARGIN + label + i * (label + _PANEL + 2 * _MARGIN)
        _panel(picture, chart, left, height - _BOTTOM)
    svg.write(picture, path)


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

    svg.line(picture, (left, bottom), (left + _PANEL, bottom))
    for tick in chart.ticks:
        svg.line(picture, (x(tick), bottom), (x(tick), bottom + 4))
        svg.words(picture, f"{tick:g}", x(tick), bottom + 16, size=11)
    if chart.low <= 0.0 <= chart.high:
        svg.line(picture, (x(0.0), _TOP - _ROW / 2), (x(0.0), bottom))
    svg.words(
        picture, f"{chart.title} (bars: 95 % intervals)", left + _PANEL / 2, bottom + 38, size=12
    )
    for i, (name, value) in enumerate(chart.rows):
        y = _TOP + _ROW * (i + 0.25)
        svg.words(picture, name, left - 8, y + 4, size=11, anchor="end")
        svg.line(picture, (x(value.low), y), (x(value.high), y), svg.COLOUR)
        for end in (value.low, value.high):
            svg.line(picture, (x(end), y - 4), (x(end), y + 4), svg.COLOUR)
        xml.SubElement(
            picture, "circle", cx=f"{x(value.mean):.1f}", cy=f"{y:.1f}", r="4", fill=svg.COLOUR
        )
