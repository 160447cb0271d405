"""A conversation for Python programs, on an engine that answers other prompts and conversations as well."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from ktcli.answers.events import AnswerPiece
from ktcli.api.engine import TextEngine, settings_over
from ktcli.api.prompts import MORE_CONTEXT
from ktcli.api.result import GenerationResult, without_thoughts
from ktcli.chat.chat import Chat
from ktcli.dialogue.answer import AnswerRun
from ktcli.errors import ContextFull


class TextChat:
    """A conversation with a loaded model: `kt.Chat`. What it has read and said is not computed again.

    Args:
        system: the text that stands before everything; empty: what the model's name presets, else none.
        max_tokens, temperature, stop, seed, think: as of `TextEngine.generate`; a seed fixes the whole conversation.
    Attributes:
        last: the last answer; None before the first.
    Raises:
        UsageError: an argument makes no sense, or the engine is closed.
    """

    def __init__(
        self,
        engine: TextEngine,
        system: str = "",
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        think: bool | None = None,
    ) -> None:
        backend = engine.backend
        settings = settings_over(engine.settings, max_tokens, temperature, stop, seed, think)
        self._engine, self._chat = engine, Chat(backend, settings)
        self._chat.conversation.system = system or engine.preset.get("system") or ""
        self._coming: Generator[AnswerPiece] | None = None  # of the answer that is being made
        self.last: GenerationResult | None = None
        engine.join(self)

    @property
    def messages(self) -> list[dict[str, str]]:
        """A copy of the conversation's messages so far, each as {"role": …, "content": …}, beginning with the system
        text if there is one.
        """
        said = self._chat.conversation
        system = [{"role": "system", "content": said.system}] if said.system else []
        return [dict(message) for message in (*system, *said.turns)]

    def ask(self, text: str) -> GenerationResult:
        """Sends the user's message `text`; returns the model's whole answer.

        Raises:
            ContextFull: `text` alone leaves no room for an answer; it is not added to the conversation.
            UsageError: the engine is closed. KtError: the generation failed.
        """
        for _ in self.stream(text):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str) -> Iterator[str]:
        """Sends the user's message `text`; yields the answer's text in pieces as it comes, without thoughts; afterwards
        `last` is the whole answer.

        The caller may stop iterating at any piece, and the next question ends an unfinished answer: the conversation
        then keeps its text up to there.

        Raises:
            As `ask`.
        """
        self._engine.require_open()
        self._end()
        pieces: list[AnswerPiece] = []
        before = self._chat.reply
        coming = self._coming = self._chat.ask(text)
        try:
            yield from without_thoughts(self._taken(coming, pieces))
        finally:
            coming.close()
            reply = self._chat.reply
            if reply is None or reply is before or not isinstance(reply.run, AnswerRun):
                pass  # it was refused
            elif self._coming is coming:
                self.last = GenerationResult.of(reply.run, pieces)

    def _taken(
        self, coming: Iterator[AnswerPiece], pieces: list[AnswerPiece]
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of an answer that comes, and adds them to `pieces`."""
        try:
            for piece in coming:
                pieces.append(piece)
                yield piece
                self._engine.require_open()
        except ContextFull as error:
            error.hint = MORE_CONTEXT
            raise

    def _end(self) -> None:
        """Ends an answer that still comes: what was said of it is part of the conversation."""
        if self._coming is not None:
            self._coming.close()
        self._coming = None

    def leave(self) -> None:
        """Ends an answer in progress, and drops the conversation's reference to the model, so that the model's memory
        can be freed.
        """
        self._end()
        self._chat.leave()
