"""`kt eval --tasks`: answers to questions beside the right ones, with an adapter and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from ktcli import smallfiles
from ktcli.assembly.prepare import prepare
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import require_text
from ktcli.assembly.variants import EvalRequest
from ktcli.commands.eval.data import read_words
from ktcli.commands.eval.options import RowOptions
from ktcli.errors import ExitCode, UsageError, counted
from ktcli.hardware.numa import asked_numa
from ktcli.judging.scores import INSTALL, ORDERS, missing
from ktcli.models import Model, build
from ktcli.output import out, safe
from ktcli.samples.sample import require_within
from ktcli.samples.source import sources_of
from ktcli.samples.tasks import read_tasks
from ktcli.store import library
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.finetune.settings import FinetuneSettings
    from ktcli.judging.asking import Answered
    from ktcli.judging.questions import AskedModel, QuestionSet
    from ktcli.judging.verdict import ModelVerdict, TaskVerdict

MAX_TOKENS = 256


def evaluate_tasks(
    name: str, of_rows: Sequence[str], given: RowOptions, asked: EvalRequest
) -> None:
    """Asks a model the questions in data files, prints how many were answered correctly, and writes the answers to the
    file of --out.
    """
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
    require_within(settings.cutoff_len, model.spec.context, ready.base)
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


METHOD = (
    "greedy answers; exact: to the letter, without blanks around; a choice is right if the model finds it likelier than"
    " the others, as the whole answer; BLEU of all answers together (sacrebleu), ROUGE as mean F1 (rouge-score)"
)
_ROUGES = ("1", "2", "L")
_NAMED = 3  # rows


def document(found: Sequence[TaskVerdict], max_tokens: int, complete: bool) -> dict[str, Any]:
    """Returns the result of an evaluation on questions as the document for --json: "results" has for each data file the
    counts of rows and questions, and for each model the number and share of exact answers, BLEU and ROUGE.
    """
    return {
        "max_tokens": max_tokens,
        "complete": complete,
        "method": METHOD,
        "install": INSTALL if missing() else None,
        "results": [_verdict(each) for each in found],
    }


def _verdict(verdict: TaskVerdict) -> dict[str, Any]:
    read = verdict.asked.read
    found: dict[str, Any] = {
        "file": read.name,
        "rows": read.rows,
        "questions": len(verdict.answered),
        "with_choices": verdict.with_choices,
        "dropped": [asdict(each) for each in read.dropped],
        "models": [_model(each, len(verdict.answered)) for each in verdict.models],
    }
    if len(verdict.models) > 1:
        found["lost"] = [each.question.task.where for each in verdict.lost]
        found["gained"] = [each.question.task.where for each in verdict.gained]
    return found


def _model(model: ModelVerdict, count: int) -> dict[str, Any]:
    scores = model.scores
    return {
        "name": model.model.label,
        "exact": model.exact,
        "exact_share": model.exact / count,
        "chosen": model.chosen,
        "cut": model.cut,
        "bleu": None if scores is None else {str(order): scores.bleu[order] for order in ORDERS},
        "rouge": None if scores is None else scores.rouge,
        "bleu_signature": None if scores is None else scores.signature,
    }


def answer_rows(found: Sequence[TaskVerdict]) -> list[dict[str, Any]]:
    """Returns a row for each answered question for the file of --out: prompt, answer, reference, and whether the answer
    is right; for a model with an adapter the answer of its base, too.
    """
    rows = []
    for verdict in found:
        for each in verdict.answered:
            task = each.question.task
            row: dict[str, Any] = {
                "where": task.where,
                "prompt": each.question.prompts[-1].text,
                "predicted": each.answers[-1].text,
                "reference": task.reference,
                "right": each.is_right(len(each.answers) - 1),
            }
            if task.choices:
                row["chosen"] = _choice(each, -1)
            if len(each.answers) > 1:
                row |= {"base_predicted": each.answers[0].text, "base_right": each.is_right(0)}
                row |= {"base_chosen": _choice(each, 0)} if task.choices else {}
            rows.append(row)
    return rows


def _choice(answered: Answered, model: int) -> str | None:
    chosen = answered.answers[model].chosen
    return None if chosen is None else answered.question.task.choices[chosen]


# --- for people -------------------------------------------------------------------------------------


def words(found: Sequence[TaskVerdict], max_tokens: int) -> str:
    """Returns the result of an evaluation on questions as text: a table for each data file, and a
    legend of its rows.
    """
    width = min(80, out.width or 80)
    blocks = [_table(each, max_tokens) for each in found]
    blocks.append("\n".join(wrap(METHOD, width)))
    if missing():
        blocks.append(f"BLEU and ROUGE need {missing()}: {INSTALL}")
    return "\n\n".join(blocks)


def _table(verdict: TaskVerdict, max_tokens: int) -> str:
    read, count = verdict.asked.read, len(verdict.answered)
    left = [f"{counted(each.rows, 'row')} left out: {each.reason}" for each in read.dropped]
    head = "; ".join([f"{safe(read.name)}: {counted(count, 'question')}", *map(safe, left)])
    models = verdict.models
    rows = [("exact", *(_share(each.exact, count) for each in models))]
    if verdict.with_choices:
        chosen = (_share(each.chosen or 0, verdict.with_choices) for each in models)
        rows.append(("right choice", *chosen))
    scores = [each.scores for each in models if each.scores is not None]
    if scores:
        rows += [(f"BLEU-{n}", *(f"{each.bleu[n]:.2f}" for each in scores)) for n in ORDERS]
        rows += [
            (f"ROUGE-{kind}", *(f"{each.rouge[kind]:.2f}" for each in scores)) for kind in _ROUGES
        ]
    if any(each.cut for each in models):
        rows.append((f"cut at {max_tokens} tokens", *(f"{each.cut:,}" for each in models)))
    table = out.table(rows, ("", *(each.model.label for each in models)), right=(1, 2))
    lines = [*wrap(head, out.width or 1000), "", table]
    if len(models) > 1:
        lines += ["", *_changed(verdict)]
    return "\n".join(lines)


def _changed(verdict: TaskVerdict) -> list[str]:
    before = sum(each.is_right(0) for each in verdict.answered)
    lost, gained = len(verdict.lost), len(verdict.gained)
    named = ", ".join(safe(each.question.task.where) for each in verdict.lost[:_NAMED])
    said = (
        f"lost: {lost:,} of {before:,} that {safe(verdict.models[0].model.label)} answers rightly"
    )
    which = f" ({named}{', …' if lost > _NAMED else ''})" if lost else ""
    return wrap(f"{said}{which}; gained: {gained:,}", out.width or 1000)


def _share(count: int, of: int) -> str:
    return f"{count:,} of {of:,} ({100 * count / of:.1f} %)"
