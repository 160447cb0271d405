"""Shows what `kt eval --tasks` found: how many answers are right, and how near the others are."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ktcli.errors import counted
from ktcli.judging.scores import INSTALL, ORDERS, missing
from ktcli.output import out, safe

if TYPE_CHECKING:
    from ktcli.judging.asking import Answered
    from ktcli.judging.verdict import ModelVerdict, TaskVerdict

METHOD = (
    "greedy answers; exact: to the letter, without blanks around; a choice is right if the model finds it likelier than"
    " the others, as the whole answer; BLEU of all answers together (sacrebleu), ROUGE as mean F1 (rouge-score)"
)
_ROUGES = ("1", "2", "L")
_NAMED = 3  # rows


def document(found: Sequence[TaskVerdict], max_tokens: int, complete: bool) -> dict[str, Any]:
    """Returns the figures for --json."""
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
        "dropped": [
            {"reason": each.reason, "rows": each.rows, "first": each.first} for each in read.dropped
        ],
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
    """Returns the answers as rows for --out: of the last model, and of the first one where there are two."""
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
    """Returns a table for each data file, and a legend of its rows."""
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
