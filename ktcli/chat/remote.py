"""A chat with a model of a server that speaks OpenAI's API: messages go there, and pieces of text come back.

No ids are known, so nothing is rendered here and nothing is said of the cache beyond what the server counts. Where the
conversation does not fit, the server says so, and half of the turns that it reads go.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ktcli.answers.events import AnswerPiece
from ktcli.chat.base import AnswerHooks, BaseChat, Progress
from ktcli.chat.compaction import SUMMARY_SHARE
from ktcli.chat.conversation import Conversation, Turn
from ktcli.chat.reply import Reply
from ktcli.client.completion import Completion
from ktcli.client.serverclient import CUT_HINT, Document, ListedModel, ServerClient
from ktcli.dialogue.backend import Identity
from ktcli.dialogue.timeline import Timeline
from ktcli.engine.request import Finish
from ktcli.errors import ContextFull, ServerFailed
from ktcli.interrupt import stoppable
from ktcli.store.retrying import with_retries
from ktcli.text.settings import Settings

# The stream of an answer, what came of it, and its first pieces; None: there are none.
_Begun = tuple[Iterator[Document], Completion, Sequence[AnswerPiece] | None]
_SUMMARY_TOKENS = 1000  # where nobody knows the context


class RemoteChat(BaseChat):
    """A conversation with a model of a server.

    Args:
        model: one that the server has.
        settings: those that are asked for; what nobody states is the server's own.
        warn: is given a sentence where another model answers than before.
    Attributes:
        server: the server.
    """

    def __init__(
        self,
        server: ServerClient,
        model: ListedModel,
        settings: Settings,
        warn: Callable[[str], object] = lambda text: None,
    ) -> None:
        super().__init__()
        self.server, self._model, self._settings, self._warn = server, model, settings, warn
        self._answered_by = ""  # the model that the server named last
        self._used_before = 0  # tokens, before the last question

    def go_to(self, model: ListedModel) -> None:
        """Continues the conversation with another model of the server."""
        self._model, self._answered_by = model, ""

    @property
    def model(self) -> Identity:
        """The identity of the model in the saved conversation: its name, and the server's address."""
        return Identity(self._model.name, self._model.name, server=self.server.url)

    @property
    def context(self) -> int | None:
        """The most positions, in tokens, that a conversation can have; None if the server does not say."""
        return self._model.context

    @property
    def longer(self) -> str:
        """A sentence for people on how to get a longer context: always that the server decides its length."""
        return "its length is up to the server"

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers: always True, since nobody knows before it does."""
        return True

    @property
    def settings(self) -> Settings:
        """The settings with which the server is asked for the next answers."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def seed(self) -> int | None:
        """The seed of the random sequence that requests ask for; None if the server draws one."""
        return self._settings.sampling.seed if self._settings.states("seed") else None

    @property
    def used(self) -> int:
        """The number of tokens of the last prompt and its answer as the server counts them; until it does, that of the
        answer so far and everything before.
        """
        if self.reply is None:
            return 0
        stats = self.reply.stats
        return (stats.prompt_tokens or self._used_before) + stats.tokens

    def _made(self, reply: Reply, hooks: AnswerHooks) -> Iterator[AnswerPiece]:
        """Yields the pieces of the answer, see `BaseChat`; if the server says that the conversation is too long, it is
        asked again with half of its turns."""
        said = self.conversation
        was = said.omitted
        while True:
            try:
                body = self._body(said.messages, self._settings)
                yield from self._told(reply, body, hooks)
                return
            except ContextFull as error:
                if reply.text or not self._settings.drops or not _leave_out(said):
                    said.omitted = was
                    error.hint = (
                        "/compact summarizes it, /undo removes the last turn, /clear starts over"
                    )
                    raise
                reply.dropped = said.omitted.turns - was.turns

    def _summed_up(
        self, before: Conversation, reply: Reply, hooks: AnswerHooks
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of a summary, see `BaseChat`."""
        most = self.context // SUMMARY_SHARE if self.context else _SUMMARY_TOKENS
        settings = replace(self._settings, max_tokens=max(1, most), stops=())
        body = self._body(before.messages, settings, constrained=False)
        return self._told(reply, body, hooks, aside=True)

    def _told(
        self, reply: Reply, body: Document, hooks: AnswerHooks, *, aside: bool = False
    ) -> Iterator[AnswerPiece]:
        """Yields the pieces of an answer.

        Args:
            aside: whether it is no answer of the conversation.
        Raises:
            ServerFailed: the server did not answer to the end; `reply` has what came.
        """
        cancelled, progress = hooks
        with contextlib.ExitStack() as held, self._stopped_by(cancelled):

            def begun() -> _Begun:
                """Asks, and waits for the first pieces: until then, nothing is lost by asking again."""
                stream = held.enter_context(contextlib.closing(self.server.stream(body)))
                reply.run = completion = Completion()
                return stream, completion, self._next(stream, completion, progress)

            with stoppable():
                if cancelled():
                    return
                stream, completion, pieces = with_retries(begun, self.server.tell)
            if not aside:
                self._used_before = self.used
                reply.timeline, self.reply = Timeline((), model=(self._model.name, "")), reply
            while pieces is not None:
                yield from pieces
                if not aside:
                    self.heard()
                with stoppable():
                    if cancelled():
                        return
                    pieces = self._next(stream, completion, progress)
            yield from completion.end()
            if completion.early:
                said = f"{self.server.url} ended the answer early: {completion.early!r}"
                raise ServerFailed(said, hint=CUT_HINT)
            reply.finish = completion.finish or Finish.STOP
            self._compare(completion)

    @staticmethod
    @contextlib.contextmanager
    def _stopped_by(cancelled: Callable[[], bool]) -> Iterator[None]:
        """Opens a context that Ctrl-C ends quietly, where that is how answers are stopped."""
        try:
            yield
        except KeyboardInterrupt:
            if not cancelled():
                raise

    def _next(
        self, stream: Iterator[Document], completion: Completion, progress: Progress | None
    ) -> Sequence[AnswerPiece] | None:
        """Returns the next pieces of an answer; None: there are no more."""
        for document in stream:
            if progress is not None:
                _report(document.get("prompt_progress"), progress)
            if pieces := completion.take(document):
                return pieces
        return None

    def _compare(self, completion: Completion) -> None:
        """Says that another model has answered than before, if it has."""
        before = self._answered_by or completion.model
        now = completion.changed or completion.model
        if now and now != before:
            self._warn(
                f"{self.server.url} now answers with the model {now[:200]}, not {before[:200]}"
            )
        self._answered_by = now or before

    def _body(
        self, messages: Sequence[Turn], settings: Settings, *, constrained: bool = True
    ) -> Document:
        """The request for an answer to messages."""
        sampling = settings.sampling
        stated = {
            name: getattr(sampling, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
            if settings.states(name)
        }
        if sampling.greedy and settings.states("greedy"):
            stated["temperature"] = 0.0
        if stated.get("top_k") == 0:
            stated["top_k"] = -1  # vLLM's word for off; its routers refuse 0
        thinking = {} if settings.thinking is None else {"chat_template_kwargs": settings.variables}
        optional: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "stop": list(settings.stops) or None,
            "thinking_token_budget": settings.think_budget,
            "response_format": self._format if constrained else None,
            "return_progress": True if self._model.says_progress else None,
        }
        given = {**stated, **optional}
        return {
            "model": self._model.name,
            "messages": list(messages),
            **{name: value for name, value in given.items() if value is not None},
            **thinking,
        }

    @property
    def _format(self) -> Document | None:
        """What the text of an answer must be, as OpenAI's API says it; None: anything."""
        if self.form is None:
            return None
        schema = json.loads(self.form.said) if isinstance(self.form.said, str) else self.form.said
        if schema == {"type": "object"}:
            return {"type": "json_object"}
        of = {"name": "answer", "schema": schema, "strict": True}
        return {"type": "json_schema", "json_schema": of}


def _leave_out(said: Conversation) -> bool:
    """Omits half of the turns that are read, whole exchanges; returns whether there were any beside the question."""
    read = len(said.turns) - said.omitted.turns
    exchanges = (read - 1) // 2
    if exchanges < 1:
        return False
    turns = said.omitted.turns + 2 * max(1, exchanges // 2)
    said.omitted = replace(said.omitted, turns=turns)
    return True


def _report(said: Any, progress: Progress) -> None:
    """Reports how far a prompt is read, as kt and llama-server say it."""
    counts = said if isinstance(said, dict) else {}
    total, cached, done = (counts.get(name) for name in ("total", "cache", "processed"))
    if type(total) is type(cached) is type(done) is int and 0 <= cached <= done <= total:
        progress(done - cached, total - cached)
