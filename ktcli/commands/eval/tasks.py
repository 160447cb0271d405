"""`kt eval --tasks`: answers to questions beside the right ones, with an adapter and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ktcli import smallfiles
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import require_text
from ktcli.assembly.variants import EvalRequest
from ktcli.commands.eval.data import read_words
from ktcli.commands.eval.options import RowOptions
from ktcli.errors import ExitCode, UsageError
from ktcli.hardware.numa import asked_numa
from ktcli.models import Model, build
from ktcli.output import out
from ktcli.samples.source import sources_of
from ktcli.samples.tasks import read_tasks
from ktcli.store import library
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.finetune.settings import FinetuneSettings
    from ktcli.judging.questions import AskedModel, QuestionSet

MAX_TOKENS = 256


def evaluate_tasks(
    name: str, of_rows: Sequence[str], given: RowOptions, asked: EvalRequest
) -> None:
    """Asks the questions and prints how many were answered correctly."""
    from ktcli.commands.view.tasks import answer_rows, document, words
    from ktcli.judging.asking import AskedHow, ask
    from ktcli.judging.questions import questions_of
    from ktcli.judging.verdict import verdicts

    settings = read_words(of_rows)
    sources = sources_of((), None, given.tasks or ())
    how = AskedHow(given.max_tokens or MAX_TOKENS, asked.threads, asked_numa(asked.numa))
    ready, model = _prepared(name, settings)
    models = _models(ready)
    samples = settings.samples
    recurrent = model.spec.sequence_elements > 0
    sets = [
        questions_of(
            read_tasks(each, models[0].texts, samples, out), models, samples, recurrent=recurrent
        )
        for each in sources
    ]
    _require_questions(sets)
    questions = [question for each in sets for question in each.questions]
    answered = ask(ready, models, questions, how, model.spec.context, out)
    found = verdicts(sets, models, answered)
    if given.answers is not None:
        _write(given.answers, answer_rows(found))
    complete = len(answered) == len(questions)
    out.result(document(found, how.max_tokens, complete), lambda: words(found, how.max_tokens))
    if not complete:
        out.warn(
            f"interrupted: these figures cover {len(answered):,} of {len(questions):,} questions"
        )
        raise typer.Exit(ExitCode.INTERRUPTED)


def _prepared(name: str, settings: FinetuneSettings) -> tuple[Ready, Model]:
    """The model, pulled and converted if need be.

    Raises:
        UsageError: its context is too short.
    """
    ready = prepare(name, Wanted(), lambda name, folder: load_tokenizer(folder), listener=out)
    with library.repairable(ready.pack):
        model = build(Pack.open(ready.pack).config)
    require_text(ready.name, embeds=model.spec.embeds)
    if settings.cutoff_len > model.spec.context:
        raise UsageError(
            f"cutoff_len {settings.cutoff_len:,} is more than the {model.spec.context:,} tokens of {ready.base}",
            hint=f"use cutoff_len={model.spec.context}",
        )
    return ready, model


def _models(ready: Ready) -> list[AskedModel]:
    """Who is asked: the model, and with its adapter if it has one."""
    from ktcli.judging.questions import AskedModel

    texts = read_text_model(ready.base, ready.pack, chats=False)
    found = [AskedModel(ready.base, texts, False)]
    if ready.adapter:
        with_it = replace(texts, rows=None)  # as in a chat with it
        found.append(AskedModel(ready.name, with_it, True))
    return found


def _require_questions(sets: Sequence[QuestionSet]) -> None:
    for each in sets:
        if not each.questions:
            why = "; ".join(f"{drop.reason} (first {drop.first})" for drop in each.read.dropped)
            raise UsageError(f"{each.read.name} has no question that can be asked: {why}")


def _write(path: Path, rows: Sequence[object]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    smallfiles.write_named(path, text)
    out.note(f"answers written to {path}")
