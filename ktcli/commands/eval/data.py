"""`kt eval --data`: the loss of held-out rows, beside that of the base model, and what is lost of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktcli.assembly.variants import EvalRequest, variants_of
from ktcli.commands.cli.assignments import LINE, assignments, settings_file
from ktcli.commands.eval.options import EvalTextOptions, RowOptions
from ktcli.errors import ExitCode, UsageError
from ktcli.output import out
from ktcli.store.reference import split_adapter
from ktcli.text.passage import read_passage

if TYPE_CHECKING:
    from ktcli.finetune.settings import FinetuneSettings
    from ktcli.samples.source import DataSource

TOKENS = 8_192  # of the text: what an adapter changes is larger than what a number format does
_KEYS = (
    "cutoff_len", "max_samples", "mask_history", "train_on_prompt", "enable_thinking", "default_system", "mix_strategy",
    "interleave_probs", "seed", "val_size", "dataset", "dataset_dir", "eval_dataset",
)  # fmt: skip


def read_words(words: Sequence[str]) -> FinetuneSettings:
    """Returns the data settings in some arguments: those of a training's settings file, overridden by key=value.

    Raises:
        UsageError: a word is neither, or a key has nothing to do with rows.
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
    """Returns the data files to evaluate: those of the options, else the datasets of the settings, those of the
    evaluation first.

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
    """Measures the loss on held-out rows and prints it."""
    from ktcli.commands.view.heldout import document, words
    from ktcli.commands.view.quality import Found
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
