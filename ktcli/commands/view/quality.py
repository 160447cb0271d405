"""Shows the results of `kt eval`: as intervals, as a document, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from textwrap import wrap
from typing import Any

from ktcli.assembly.variants import EvalRequest, SplitPart, Variant
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
        """Returns the results of the variants that predicted enough tokens for an interval."""
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
    """Returns the table for people, and a legend of its columns."""
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
