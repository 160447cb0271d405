"""The answers to many prompts that one thread asks of one engine: submitted as there is room, and told as they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ktcli.answers.events import AnswerPiece
from ktcli.answers.format import AnswerFormat
from ktcli.dialogue.answer import AnswerEvent, AnswerOptions, AnswerRun, Ended, Said
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.dialogue.shared import SharedScheduler
from ktcli.engine.request import Answer, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.errors import KtError


class PromptAnswer:
    """The answer in progress to one of many prompts.

    Attributes:
        run: the answer, see `AnswerRun`.
        pieces: what it has said so far.
    """

    def __init__(
        self,
        answers: AnswerFormat,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        scheduler: SharedScheduler,
    ) -> None:
        self._scheduler = scheduler
        self.pieces: list[AnswerPiece] = []
        self._error: Exception | None = None
        context = scheduler.engine.context
        self.run = AnswerRun(answers, context, prompt, options, self._submit, self._take)

    def has_ended(self) -> bool:
        """Returns whether the answer is complete.

        Raises:
            Exception: the answer failed; this is its error.
        """
        if self._error is not None:
            raise self._error
        return self.run.finish is not None

    def _submit(
        self, request: GenerationRequest, sampler: Sampler | None, *, goes_on: bool
    ) -> Answer:
        return self._scheduler.submit(request, self.run.hear, sampler, goes_on=goes_on)

    def _take(self, event: AnswerEvent) -> None:
        if isinstance(event, Said):
            self.pieces += [each for each in event.events if isinstance(each, AnswerPiece)]
        elif isinstance(event, Ended):
            self._error = event.error


def ended(
    answers: Iterable[PromptAnswer],
    scheduler: SharedScheduler,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[PromptAnswer]:
    """Submits answers as the scheduler has room, and yields each when it has ended, until all have or `cancelled`
    returns True. Then, or if one fails or the iterator is closed, those still in progress are cancelled.

    Raises:
        Exception: an answer failed.
    """
    waiting, going = deque(answers), list[PromptAnswer]()
    try:
        while (waiting or going) and not cancelled():
            while waiting and scheduler.has_room:
                going.append(waiting.popleft())
                going[-1].run.submit()
            scheduler.step()
            done = [each for each in going if each.has_ended()]
            going = [each for each in going if each not in done]
            yield from done
    finally:
        for each in going:
            each.run.cancel()
        if going:
            with suppress(KtError):  # the first error is told
                scheduler.step()
