"""A model in a server of this library, as the backend of a chat: only its text files are read here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import field, fields, replace

import msgspec

from ktcli.answers.format import AnswerFormat
from ktcli.answers.grammar.form import AnswerConstraint
from ktcli.assembly.adapted import identity
from ktcli.assembly.ready import Ready
from ktcli.dialogue.backend import Identity
from ktcli.engine.drafting import DraftOptions, cannot_draft
from ktcli.engine.request import (
    Answer,
    Event,
    Finish,
    Finished,
    GenerationRequest,
    PromptRead,
    Stats,
    Token,
)
from ktcli.engine.sampler import Sampler
from ktcli.errors import KtError
from ktcli.records import dataclass
from ktcli.server.attached.client import Exchange, ServerPlace, facts_of
from ktcli.server.attached.wire import (
    PATH,
    PROTOCOL,
    Began,
    Clock,
    EngineFacts,
    EngineRequest,
    Message,
    NextId,
    ReadOn,
)
from ktcli.store.places import server_sockets
from ktcli.text.model import TextModel


@dataclass(frozen=True, slots=True)
class AttachedSize:
    """The sizes of a server's model that a conversation needs, see `ModelSize`."""

    vocab: int
    context: int


class AttachedEngine:
    """The part of a server's engine that a conversation needs, see `AnsweringEngine`.

    Attributes:
        clocks: the server's clocks, as they were said last.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.spec = AttachedSize(facts.vocab, facts.model_context)
        self.context = facts.context
        self.clocks: Sequence[Clock] = ()

    def operations(self) -> Sequence[Clock]:
        """Returns the name of each operation of the server's engine on the CPU with the nanoseconds spent on it so far,
        as the server last reported them."""
        return self.clocks


@dataclass(frozen=True, slots=True)
class AttachedBackend:
    """A server's model, see `ChatBackend`.

    Attributes:
        facts: what the server says of it.
    """

    name: str
    served: ServerPlace
    facts: EngineFacts
    texts: TextModel
    asked: str
    loading_s: float = 0.0
    engine: AttachedEngine = field(init=False)
    answers: AnswerFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", AttachedEngine(self.facts))
        object.__setattr__(self, "answers", AnswerFormat.of(self.texts))

    @property
    def recurrent(self) -> bool:
        """Whether some layer of the model has a recurrent state, as the server reports it."""
        return self.facts.recurrent

    @property
    def model(self) -> Identity:
        """The identity of the server's model in saved conversations: its name, the name that finds it again, and its
        pack."""
        return Identity(self.name, self.asked or self.name, self.facts.pack)

    def session(self, draft: DraftOptions) -> AttachedSession:
        """Returns a new session that sends the requests of one conversation to the server.

        Raises:
            UsageError: `draft` explicitly asks for drafts, and they could change this model's answers.
        """
        if draft.drafts and draft.asked and not self.facts.drafts:
            raise cannot_draft()
        return AttachedSession(self, draft)


class AttachedSession:
    """A conversation with a server's model, see `ChatSession`: each request is a connection of its own.

    Attributes:
        began: the server's clocks when it took the last request.
    """

    def __init__(self, backend: AttachedBackend, draft: DraftOptions) -> None:
        self._backend, self._draft = backend, draft
        self._engine = backend.engine
        self._caller = f"chat {os.getpid()} {secrets.token_hex(4)}"
        self.began: Sequence[Clock] = ()
        self._exchange: Exchange | None = None
        self._answer: Answer | None = None
        self._read = msgspec.json.Decoder(Message)

    def submit(
        self,
        request: GenerationRequest,
        sampler: Sampler,
        constraint: AnswerConstraint | None = None,
    ) -> Answer:
        """Sends a request to the server; returns its answer, which has no ids until `step` adds those that arrive.

        Raises:
            NotFound: the server has stopped.
        """
        body = msgspec.json.encode(
            EngineRequest(
                PROTOCOL,
                self._backend.facts.pack,
                list(request.prompt),
                replace(sampler.settings, seed=sampler.seed),
                sampler.drawn,
                list(request.stop_ids),
                request.max_tokens,
                request.depths,
                list(request.marks),
                self._draft,
                constraint,
                self._caller,
                request.said,
                request.shared,
                request.forced,
            )
        )
        self._exchange = Exchange(self._backend.served, f"{PATH}/generate", body)
        self._answer = Answer(request, 0, sampler)
        return self._answer

    def step(self) -> list[Event]:
        """Returns the events of the current answer that arrive from the server within WAIT_S seconds; empty: none does,
        or there is no answer. A failure is the last event."""
        answer, exchange = self._answer, self._exchange
        if answer is None or exchange is None:
            return []
        if answer.cancelled:
            return [self._end(answer, Finish.CANCELLED)]
        events: list[Event] = []
        try:
            for line in exchange.lines():
                events += self._events_of(answer, self._read.decode(line))
                if answer.finish is not None:
                    return events
            if exchange.ended:
                raise self._backend.served.gone()
        except msgspec.DecodeError as error:
            said = KtError(
                f"the server of {self._backend.name} runs another version of kt ({error})"
            )
            events.append(self._end(answer, Finish.FAILED, said))
        except KtError as error:
            events.append(self._end(answer, Finish.FAILED, error))
        return events

    def _events_of(self, answer: Answer, message: Message) -> list[Event]:
        """Returns the events of a message."""
        if isinstance(message, Began):
            self.began = message.clocks
            return []
        for each in fields(Stats):  # those of the server count
            setattr(answer.stats, each.name, getattr(message.stats, each.name))
        if isinstance(message, ReadOn):
            return [PromptRead(answer, message.done, message.total)]
        if isinstance(message, NextId):
            return self._chosen(answer, message)
        self._engine.clocks = message.clocks
        answer.sampler.skip(message.drawn - answer.sampler.drawn)
        finish = Finish(message.finish)
        if finish is Finish.CANCELLED:  # not from here: the server ends
            raise self._backend.served.gone()
        if finish is Finish.FAILED:
            raise KtError(message.failure.error, hint=message.failure.hint)
        return [self._end(answer, finish)]

    def _chosen(self, answer: Answer, message: NextId) -> list[Event]:
        """Returns the events of an id; the conversation may end with it where the server does not know."""
        if not answer.ids:
            self._engine.clocks, answer.depths = message.clocks, message.depths
        answer.ids.append(message.id)
        if not answer.sampler.settings.is_greedy:
            answer.sampler.skip(1)
        events: list[Event] = [Token(answer, message.id, how=message.how)]
        if answer.request.ends(message.id):
            # Of a step that gave more ids, the others do not count.
            answer.stats.accepted -= answer.stats.tokens - len(answer.ids)
            answer.stats.tokens = len(answer.ids)
            events.append(self._end(answer, Finish.STOP))
        return events

    def keep(self) -> None:
        """Does nothing: the server itself stores the cache of the conversation."""

    def close(self) -> None:
        """Does nothing: the cache of the conversation is the server's."""

    abandon = close

    def _end(self, answer: Answer, finish: Finish, error: Exception | None = None) -> Finished:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._answer = None
        answer.finish = finish
        return Finished(answer, finish, error)


def find(ready: Ready) -> tuple[ServerPlace, EngineFacts | None] | None:
    """Returns a running server of this library that has the model `ready` in memory or can load it; None: there is
    none.

    Returns:
        The server's address, and the facts of the model's engine there. Of the servers that have the model in memory,
            it is the one with the longest context; if none has it, the first that can load it, and None as the facts.
    Raises:
        KtError: other users may write to the folder of the sockets.
    """
    pack, loaded, others = identity(ready), [], []
    for path in server_sockets():
        served = ServerPlace(path, ready.name)
        said = facts_of(served, pack)
        if isinstance(said, EngineFacts):
            loaded.append((served, said))
        elif said is not None:
            others.append(served)
    if loaded:
        return max(loaded, key=lambda each: each[1].context)
    return (others[0], None) if others else None


class AttachedModel:
    """A server's model that a chat uses, see `ChatModel`.

    Args:
        facts: what the server says of it.
        asked: the name that finds the model again.
    Attributes:
        backend: the backend of the chat.
        place: where the model is.
        keeps_pages: false, as the server keeps them.
        held_bytes: the memory that is free when it is left.
    """

    def __init__(
        self, ready: Ready, served: ServerPlace, facts: EngineFacts, texts: TextModel, asked: str
    ) -> None:
        self.ready = ready
        self.backend = AttachedBackend(ready.name, served, facts, texts, asked)
        self.place = f"served on port {served.port}"
        self.keeps_pages = False
        self.held_bytes = 0

    def forget(self) -> None:
        """Does nothing: the model is in the server's memory."""

    def close(self) -> None:
        """Does nothing: the server keeps running."""
