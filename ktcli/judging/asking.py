"""Asks a model, with its adapter and without, and keeps what it answers.

All prompts go through one scheduler on one engine. A question that names its choices is also decided by likelihood:
that choice is taken which the model would most probably give, its end included, as the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ktcli.answers.format import AnswerFormat
from ktcli.api.result import GenerationResult
from ktcli.assembly.listener import SILENT, Bar, Listener
from ktcli.assembly.load import load
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.dialogue.answer import AnswerOptions
from ktcli.dialogue.many import PromptAnswer, ended
from ktcli.dialogue.shared import SharedScheduler
from ktcli.engine import Engine
from ktcli.engine.scheduler import Limits
from ktcli.errors import NotEnoughMemory
from ktcli.hardware.numa import Numa
from ktcli.interrupt import Interrupt
from ktcli.judging.questions import AskedModel, Choice, TaskQuestion
from ktcli.judging.scores import is_right
from ktcli.measure.evaluate import EvalCase, score, windows_at_once
from ktcli.records import dataclass
from ktcli.sampling import SamplingSettings

PARALLEL = 8  # prompts that are answered at the same time
_CUT = ("length", "context")


@dataclass(frozen=True, slots=True)
class AskedHow:
    """The options with which models are asked questions.

    Attributes:
        max_tokens: the most tokens of an answer.
        threads, numa: as of a chat.
    """

    max_tokens: int
    threads: int | None = None
    numa: Numa | None = None

    def wanted(self, questions: Sequence[TaskQuestion], most: int, streams: int) -> Wanted:
        """Returns the options with which the engine is loaded, with a context for the longest question and its answer,
        but of at most `most` positions.

        Args:
            most: the positions that the model can have.
            streams: the number of prompts that are answered at the same time.
        """
        context = min(most, max(each.longest for each in questions) + self.max_tokens)
        scored = any(each.choices for each in questions)
        return Wanted(context, self.threads, all_logits=scored, streams=streams, numa=self.numa)


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """An answer of a model.

    Attributes:
        text: without thoughts, and without blanks around it.
        cut: whether it was ended before the model ended it.
        chosen: the number of the likeliest choice; None: the answer is free.
    """

    text: str
    cut: bool
    chosen: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A question, and the answer of each model."""

    question: TaskQuestion
    answers: tuple[GivenAnswer, ...]

    def is_right(self, model: int) -> bool:
        """Returns whether the answer of the model with this index is right: it chose the right one of the choices or,
        without choices, its text is literally the right answer.
        """
        task, given = self.question.task, self.answers[model]
        if given.chosen is not None:
            return given.chosen == task.right
        return is_right(given.text, task.reference)


def ask(
    ready: Ready,
    models: Sequence[AskedModel],
    questions: Sequence[TaskQuestion],
    how: AskedHow,
    most: int,
    listener: Listener = SILENT,
) -> list[Answered]:
    """Returns each question with the answers of all models to it; after Ctrl-C only the questions that all models have
    answered.

    Args:
        ready: the model with its adapter, if one of `models` is adapted.
        most: the positions that the model can have.
    Raises:
        NotEnoughMemory: the model does not fit. KeyboardInterrupt: Ctrl-C came before all had answered a question.
    """
    engine, streams = _loaded(ready, lambda streams: how.wanted(questions, most, streams), listener)
    with Interrupt() as interrupt:
        asked = _Inquiry(engine, streams, models, questions, listener, interrupt)
        chosen, given = asked.choices(), asked.answers(how.max_tokens)
    found = []
    for number, question in enumerate(questions):
        results = [given[number, model] for model in range(len(models)) if (number, model) in given]
        chances = [chosen.get((number, model)) for model in range(len(models))]
        if len(results) < len(models) or (question.choices and None in chances):
            continue
        answers = (
            GivenAnswer(result.text.strip(), result.finish in _CUT, chance)
            for result, chance in zip(results, chances, strict=True)
        )
        found.append(Answered(question, tuple(answers)))
    if not found:
        raise KeyboardInterrupt
    return found


@dataclass(frozen=True, slots=True)
class _Inquiry:
    """Who is asked what on a loaded engine, which has room for so many sequences."""

    engine: Engine
    streams: int
    models: Sequence[AskedModel]
    questions: Sequence[TaskQuestion]
    listener: Listener
    cancelled: Callable[[], bool]

    def choices(self) -> dict[tuple[int, int], int]:
        """The likeliest choice of each question, by the numbers of question and model, as far as they were read."""
        with_choices = [n for n, question in enumerate(self.questions) if question.choices]
        found: dict[tuple[int, int], int] = {}
        if not with_choices:
            return found
        total = sum(_tokens(each) for n in with_choices for each in self.questions[n].choices)
        with self.listener.progress("Reading choices", total, unit="tokens") as bar:
            done = 0
            for number, model in enumerate(self.models):
                choices = [each for n in with_choices for each in self.questions[n].choices[number]]
                over = [window for window, _ in choices]
                (scores,) = score(
                    [EvalCase(self.engine, adapted=model.adapted)],
                    over,
                    at_once=min(self.streams, windows_at_once(over, self.engine.spec.vocab)),
                    compare=False,
                    progress=partial(_advance, bar, done),
                    cancelled=self.cancelled,
                )
                done += _tokens(choices)
                losses = _losses(scores.nll, choices)
                for n in with_choices:
                    own = list(islice(losses, len(self.questions[n].task.choices)))
                    if len(own) == len(self.questions[n].task.choices):
                        found[n, number] = int(np.argmin(own))
        return found

    def answers(self, max_tokens: int) -> dict[tuple[int, int], GenerationResult]:
        """The greedy answers, by the numbers of question and model, as far as they are whole."""
        greedy = SamplingSettings(temperature=0.0)
        formats = [AnswerFormat.of(model.texts) for model in self.models]
        with (
            self.engine.pools.adapter_aside() as adapter,
            closing(SharedScheduler(self.engine, Limits(active=self.streams))) as scheduler,
            self.listener.progress(
                "Answering", len(self.models) * len(self.questions), unit="answers"
            ) as bar,
        ):
            places: dict[PromptAnswer, tuple[int, int]] = {}
            # All models side by side, for whoever presses Ctrl-C.
            for n, question in enumerate(self.questions):
                for number, model in enumerate(self.models):
                    own = adapter if model.adapted else None
                    options = AnswerOptions(greedy, max_tokens=max_tokens, adapter=own)
                    made = PromptAnswer(
                        formats[number], question.prompts[number], options, scheduler
                    )
                    places[made] = (n, number)
            found: dict[tuple[int, int], GenerationResult] = {}
            for each in ended(places, scheduler, self.cancelled):
                found[places[each]] = GenerationResult.of(each.run, each.pieces)
                bar.update(done=len(found))
            return found


def _loaded(
    ready: Ready, wanted: Callable[[int], Wanted], listener: Listener
) -> tuple[Engine, int]:
    """The engine, and the sequences that it has room for: PARALLEL, or one where there is no memory for more."""
    try:
        return load(ready, wanted(PARALLEL), listener), PARALLEL
    except NotEnoughMemory:
        return load(ready, wanted(1), listener), 1


def _tokens(choices: Sequence[Choice]) -> int:
    return sum(len(window.ids) - 1 for window, _ in choices)


def _advance(bar: Bar, before: int, done: int) -> None:
    bar.update(done=before + done)


def _losses(nll: NDArray[np.float64], choices: Sequence[Choice]) -> Iterator[float]:
    """Yields the negative log-likelihood of each choice, as far as they were read."""
    at = 0
    for window, mask in choices:
        here = nll[at : at + window.counted]
        if here.size < window.counted:
            return
        yield float(here[mask].sum())
        at += window.counted
