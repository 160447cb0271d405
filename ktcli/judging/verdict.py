"""Counts what models answered rightly, of each data file, and what an adapter gained and lost."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.judging.asking import Answered
from ktcli.judging.questions import AskedModel, QuestionSet
from ktcli.judging.scores import TextScores, is_right, text_scores
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """The results of one model.

    Attributes:
        exact: the answers that are right to the letter.
        chosen: of questions with choices, those whose likeliest choice is the right one; None: there are none.
        scores: BLEU and ROUGE; None: their libraries are not installed.
        cut: answers that were ended before the model ended them.
    """

    model: AskedModel
    exact: int
    chosen: int | None
    scores: TextScores | None
    cut: int


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The results of models on the questions of a data file.

    Attributes:
        asked: the file's questions, and what was left out. answered: those that all models answered.
        with_choices: those of them that have choices.
        lost: those that the first model, without an adapter, answers rightly, and the last one does not.
        gained: the reverse.
    """

    asked: QuestionSet
    answered: tuple[Answered, ...]
    with_choices: int
    models: tuple[ModelVerdict, ...]
    lost: tuple[Answered, ...]
    gained: tuple[Answered, ...]


def verdicts(
    sets: Sequence[QuestionSet], models: Sequence[AskedModel], answered: Sequence[Answered]
) -> list[TaskVerdict]:
    """Returns, for each data file of which a question was answered, how many answers of each model are right, and which
    questions the last model answers rightly but the first does not (gained), or the reverse (lost).
    """
    by_question = {id(each.question): each for each in answered}
    found = []
    for each in sets:
        own = [by_question[id(q)] for q in each.questions if id(q) in by_question]
        if own:
            found.append(_verdict(each, models, own))
    return found


def _verdict(
    asked: QuestionSet, models: Sequence[AskedModel], answered: Sequence[Answered]
) -> TaskVerdict:
    with_choices = [each for each in answered if each.question.choices]
    references = [each.question.task.reference for each in answered]
    found = []
    for number, model in enumerate(models):
        texts = [each.answers[number].text for each in answered]
        exact = sum(map(is_right, texts, references))
        chosen = sum(each.is_right(number) for each in with_choices) if with_choices else None
        cut = sum(each.answers[number].cut for each in answered)
        found.append(ModelVerdict(model, exact, chosen, text_scores(texts, references), cut))
    last = len(models) - 1
    lost = tuple(each for each in answered if each.is_right(0) and not each.is_right(last))
    gained = tuple(each for each in answered if each.is_right(last) and not each.is_right(0))
    return TaskVerdict(asked, tuple(answered), len(with_choices), tuple(found), lost, gained)
