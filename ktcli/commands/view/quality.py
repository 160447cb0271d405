"""Shows the results of `kt eval`: as intervals, as a document, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from textwrap import wrap
from typing import Any

from ktcli.assembly.ways import EvalRequest, SplitPart, Way
from ktcli.commands.view.fidelity import calibrated_by
from ktcli.measure.evaluate import Difference, Scores, difference
from ktcli.measure.intervals import LEAST_VALUES, MOST_BLOCKS, Interval, interval
from ktcli.output import out, safe
from ktcli.text.passage import Passage, Reading

METHOD = (
    f"95 % intervals: Student's t on the means of up to {MOST_BLOCKS} blocks of consecutive tokens"
    " of equal length; differences are taken token by token first"
)


@dataclass(frozen=True, slots=True)
class WayResult:
    """The result of one way of running a model.

    Attributes:
        tokens: the number of tokens that it predicted.
        nll: the negative log-likelihood, nats per token.
        against: the difference from the first way, in pairs of tokens; None: this is the first.
    """

    way: Way
    tokens: int
    nll: Interval
    against: Difference | None


@dataclass(frozen=True, slots=True)
class Found:
    """The results of all ways, and the text.

    Attributes:
        complete: whether all ways read all of the text.
    """

    results: tuple[WayResult, ...]
    passage: Passage
    reading: Reading
    asked: EvalRequest
    complete: bool

    @classmethod
    def of(
        cls,
        ways: Sequence[Way],
        scores: Sequence[Scores],
        passage: Passage,
        reading: Reading,
        asked: EvalRequest,
        complete: bool,
    ) -> Found:
        """Makes the results of the ways that predicted enough for an interval."""
        results = tuple(
            WayResult(
                way, len(each.nll), interval(each.nll), difference(each, scores[0]) if i else None
            )
            for i, (way, each) in enumerate(zip(ways, scores, strict=True))
            if len(each.nll) >= LEAST_VALUES
        )
        return cls(results, passage, reading, asked, complete)

    @property
    def tokens(self) -> int:
        """The number of tokens that every result has."""
        return min((result.tokens for result in self.results), default=0)


# --- for --json -------------------------------------------------------------------------------------


def document(found: Found) -> dict[str, Any]:
    """Returns the figures for --json, nats per token unless their name says otherwise."""
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
        "first": found.results[0].way.label,
        "results": [_row(result, found.reading) for result in found.results],
        **({"split": _splits(found)} if found.asked.split else {}),
    }


def _splits(found: Found) -> list[dict[str, Any]]:
    """The parts of each conversion's loss, one document for each conversion and cache."""
    return [
        {
            "conversion": whole.way.conversion,
            "kv": whole.way.cache,
            **{
                str(each.way.part): _part(each)
                for each in found.results
                if each.way.beside(whole.way)
            },
        }
        for whole in found.results
        if whole.way.part is SplitPart.TOGETHER
    ]


def _part(result: WayResult) -> dict[str, Any]:
    against = result.against
    return {"nll": _figures(result.nll)} if against is None else _differences(against)


def _row(result: WayResult, reading: Reading) -> dict[str, Any]:
    way, against = result.way, result.against
    row: dict[str, Any] = {
        "name": way.label,
        "model": way.ready.name,
        "experts": way.recipe.experts_name,
        "dense": way.recipe.dense.name,
        "calibration": way.calibration or None,
        "defer": way.defer,
        "kv": way.cache,
        "part": way.part,
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
    """Returns the table for people, and what its columns mean."""
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
            result.way.label,
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
            (result.way.label, *_compared(result.against)) for result in others if result.against
        ]
        head = (f"against {safe(first.way.label)}", "nats per token", "KL", "same top token")
        lines += ["", out.table(rows, head, right=(1, 2, 3))]
    calibrated = {r.way.conversion: r.way.calibration for r in found.results if r.way.calibration}
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
