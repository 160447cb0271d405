"""`kt eval --data`: the loss of held-out rows, beside that of the base model, and what is lost of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktcli.assembly.ways import EvalRequest, cut, read, ways_of
from ktcli.commands.cli.assignments import LINE, assignments, settings_file
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


@dataclass(frozen=True, slots=True)
class DataWords:
    """What the command line says of rows and models.

    Attributes:
        model, against, formats: as of `ways_of`.
        files: of --data. words: settings.
        text: of --text. tokens: the most of it.
        placed: threads and numa.
    """

    model: str
    files: Sequence[Path]
    words: Sequence[str]
    against: str | None
    formats: str | None
    text: Path | None
    tokens: int | None
    allow_special: bool
    placed: tuple[int | None, str | None]


def read_words(words: Sequence[str]) -> FinetuneSettings:
    """Returns the settings of rows that words give: those of a file that trained, and key=value before it.

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
    """Returns the data files that are meant: those of the options, else the datasets of the settings, those of the
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


def evaluate_data(said: DataWords, asked: EvalRequest) -> None:
    """Measures the loss of held-out rows and shows it."""
    from ktcli.commands.view.heldout import document, words
    from ktcli.commands.view.quality import Found
    from ktcli.judging.heldout import measure_with_text, read_held_out

    settings = read_words(said.words)
    sources = sources_for(said.files, settings)
    base, adapter = split_adapter(said.model)
    against = said.against
    if adapter and against is None and said.formats is None:
        against = base
    ways = ways_of(said.model, against, said.formats, asked, *said.placed, out)
    data = read_held_out(ways, sources, settings, out)
    wants_text = any(way.ready.adapter for way in ways) or said.text is not None
    passage = read_passage(said.text)
    asked = replace(asked, tokens=said.tokens or TOKENS)
    reading = read(ways, passage, asked.tokens, allow_special=said.allow_special)
    over = cut(reading, passage, asked, out) if wants_text else []
    loss, scores = measure_with_text(ways, data, over, asked, said.placed, out)
    text = Found.of(ways, scores, passage, reading, asked, loss.complete) if over else None
    text = text if text and text.results else None
    names = tuple(each.name for each in sources)
    out.result(document(loss, text, names), lambda: words(loss, text, names))
    if not loss.complete:
        out.warn(f"interrupted: these figures cover {len(loss.where):,} rows")
        raise typer.Exit(ExitCode.INTERRUPTED)
