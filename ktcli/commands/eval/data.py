"""`kt eval --data`: the loss of held-out rows, beside that of the base model, and what is lost of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from ktcli.assembly.variants import EvalRequest, variants_of
from ktcli.commands.cli.assignments import LINE, assignments, settings_file
from ktcli.commands.eval.options import EvalTextOptions, RowOptions
from ktcli.commands.view import quality
from ktcli.commands.view.quality import Found
from ktcli.errors import ExitCode, UsageError, counted
from ktcli.measure.intervals import LEAST_GROUPS, Interval
from ktcli.output import out, safe
from ktcli.store.reference import split_adapter
from ktcli.text.passage import read_passage

if TYPE_CHECKING:
    from ktcli.finetune.settings import FinetuneSettings
    from ktcli.judging.heldout import HeldOutLoss, HeldOutResult, RowDifference, RowMean
    from ktcli.samples.source import DataSource

TOKENS = 8_192  # of the text: what an adapter changes is larger than what a number format does
_KEYS = (
    "cutoff_len", "max_samples", "mask_history", "train_on_prompt", "enable_thinking", "default_system", "mix_strategy",
    "interleave_probs", "seed", "val_size", "dataset", "dataset_dir", "eval_dataset",
)  # fmt: skip


def read_words(words: Sequence[str]) -> FinetuneSettings:
    """Returns the settings for reading rows of data, from arguments that name files of training settings or are
    key=value, which overrides the files.

    Raises:
        UsageError: an argument is neither, or a key does not affect how rows are read.
    """
    from ktcli.finetune.settings import READERS, WITHOUT_EFFECT, read_given

    pairs, others = assignments(words)
    if useless := [
        key for key in pairs if key in READERS.keys() | WITHOUT_EFFECT.keys() and key not in _KEYS
    ]:
        raise UsageError(
            f"{useless[0]} changes nothing about an evaluation",
            hint=f"settings of rows are {', '.join(_KEYS)}",
        )
    given = []
    for word in others:
        if (found := settings_file(word)) is None:
            raise UsageError(
                f"{word[:80]!r} is neither a setting nor a file of settings",
                hint="settings are given as key=value, for example cutoff_len=4096; rows with --data FILE",
            )
        given.append(found)
    return read_given([*given, (LINE, pairs)]).settings


def sources_for(files: Sequence[Path], settings: FinetuneSettings) -> tuple[DataSource, ...]:
    """Returns the data files to evaluate: `files`, if there are any, else those of the settings eval_dataset or
    dataset.

    Raises:
        UsageError: none is named. NotFound, BadData: see `sources_of`.
    """
    from ktcli.samples.source import sources_of

    names = () if files else settings.eval_dataset or settings.dataset or ()
    if not files and not names:
        raise UsageError(
            "no data is named",
            hint="--data FILE, or dataset=NAME of dataset_info.json in dataset_dir",
        )
    return sources_of(names, Path(settings.dataset_dir).expanduser(), files)


def evaluate_data(
    model: str,
    settings: Sequence[str],
    given: RowOptions,
    text: EvalTextOptions,
    asked: EvalRequest,
) -> None:
    """Measures a model's loss on held-out rows of data, and with --text or an adapter on a text as
    well, and prints it.
    """
    from ktcli.judging.heldout import measure_with_text, read_held_out
    from ktcli.judging.prediction import cut, read

    of_rows = read_words(settings)
    sources = sources_for(given.data or (), of_rows)
    base, adapter = split_adapter(model)
    against = text.against
    if adapter and against is None and text.formats is None:
        against = base
    variants = variants_of(model, against, text.formats, asked, out)
    data = read_held_out(variants, sources, of_rows, out)
    wants_text = any(variant.ready.adapter for variant in variants) or text.text is not None
    passage = read_passage(text.text)
    asked = replace(asked, tokens=text.tokens or TOKENS)
    reading = read(variants, passage, asked.tokens, allow_special=text.allow_special)
    over = cut(reading, passage, asked, out) if wants_text else []
    loss, scores = measure_with_text(variants, data, over, asked, out)
    found = Found.of(variants, scores, passage, reading, asked, loss.complete) if over else None
    found = found if found and found.results else None
    names = tuple(each.name for each in sources)
    out.result(document(loss, found, names), lambda: words(loss, found, names))
    if not loss.complete:
        out.warn(f"interrupted: these figures cover {len(loss.where):,} rows")
        raise typer.Exit(ExitCode.INTERRUPTED)


METHOD = (
    "95 % intervals: Student's t on rows, whose tokens are alike; every trained token counts the same, as in training;"
    " differences are taken token by token first"
)
_WORST = 3  # rows that are named


def document(loss: HeldOutLoss, text: Found | None, files: Sequence[str]) -> dict[str, Any]:
    """Returns the result of an evaluation on held-out rows as the document for --json: "data" (files and counts of
    rows), "results" (the loss of each model and its difference from the first) and "rows" (the losses of each row).
    Losses are in nats per trained token unless their name says otherwise.

    Args:
        text: the result on a text; None: none was measured.
        files: the names of the data files.
    """
    read = loss.data.read
    return {
        "data": {
            "files": list(files),
            "sha256": read.sha256,
            "rows": len(loss.where),
            "trained_tokens": int(loss.tokens.sum()),
            "dropped": [asdict(each) for each in read.dropped],
            "notes": list(read.notes),
        },
        "complete": loss.complete,
        "method": METHOD,
        "first": loss.results[0].variant.label,
        "results": [_result(each) for each in loss.results],
        "rows": [
            {
                "where": where,
                "tokens": int(tokens),
                "loss": [float(each.rows[n]) for each in loss.results],
            }
            for n, (where, tokens) in enumerate(zip(loss.where, loss.tokens, strict=True))
        ],
        "text": None if text is None else quality.document(text),
    }


def _result(result: HeldOutResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": result.variant.label,
        "model": result.variant.ready.name,
        "loss": _figures(result.loss),
    }
    if (against := result.against) is not None:
        found["against_first"] = {
            "delta_loss": _figures(against.loss),
            "kl": None if against.kl is None else _figures(against.kl),
            "same_top_token": _figures(against.same_best),
            "rows_better": against.better,
            "rows_worse": against.worse,
        }
    return found


def _figures(value: RowMean) -> dict[str, float | None]:
    of = value.interval
    return {
        "mean": value.mean,
        "low": None if of is None else of.low,
        "high": None if of is None else of.high,
    }


# --- for people -------------------------------------------------------------------------------------


def words(loss: HeldOutLoss, text: Found | None, files: Sequence[str]) -> str:
    """Returns the result of an evaluation on held-out rows as text: a table of losses, one of comparisons with the
    first model if there are several, and how the intervals were found; then the result on a text, if there is one.
    """
    width = min(80, out.width or 80)
    dropped = sum(each.rows for each in loss.data.read.dropped)
    left = f"; of {counted(dropped, 'row')} something was left out or cut: --json says why"
    head = (
        f"{', '.join(map(safe, files))}: {counted(len(loss.where), 'row')},"
        f" {counted(int(loss.tokens.sum()), 'trained token')}{left if dropped else ''}"
    )
    first, *others = loss.results
    rows = [
        (each.variant.label, _shown(each.loss), f"{_exp(each.loss.mean)}") for each in loss.results
    ]
    table = out.table(rows, ("", "loss, nats per token", "perplexity"), right=(1, 2))
    lines = [*wrap(head, out.width or 1000), "", table]
    if others:
        compared = [
            (each.variant.label, *_compared(each.against)) for each in others if each.against
        ]
        top = (
            f"against {safe(first.variant.label)}", "loss", "KL", "same top token", "rows better", "worse",
        )  # fmt: skip
        lines += ["", out.table(compared, top, right=(1, 2, 3, 4, 5)), "", *_worst(loss)]
    method = METHOD
    if len(loss.where) < LEAST_GROUPS:
        method = f"fewer than {LEAST_GROUPS} rows say nothing about others, so there is no interval"
    lines += ["", *wrap(f"± {method}", width)]
    if text is not None:
        lines += ["", "How much of the old is lost:", "", quality.words(text)]
    return "\n".join(lines)


def _worst(loss: HeldOutLoss) -> list[str]:
    """The rows that the last variant predicts worst."""
    last = loss.results[-1]
    order = sorted(range(len(loss.where)), key=lambda n: -last.rows[n])[:_WORST]
    said = ", ".join(f"{safe(loss.where[n])} ({last.rows[n]:.4f})" for n in order)
    return wrap(f"highest loss of {safe(last.variant.label)}: {said}", out.width or 1000)


def _compared(against: RowDifference) -> tuple[str, ...]:
    same = against.same_best
    half = "" if same.interval is None else f" ± {100 * same.interval.half:.2f}"
    return (
        _shown(against.loss, "+.4f"),
        "-" if against.kl is None else _shown(against.kl),
        f"{100 * same.mean:.2f}{half} %",
        f"{against.better:,}",
        f"{against.worse:,}",
    )


def _exp(value: float) -> str:
    found = Interval(value, value, value).exp().mean
    return f"{found:,.3f}" if found < 1e6 else f"{found:.3e}"


def _shown(value: RowMean, form: str = ".4f") -> str:
    half = "" if value.interval is None else f" ± {value.interval.half:.4f}"
    return f"{value.mean:{form}}{half}"
