"""A model that a server of this library holds, as the partner of a chat: only its text files are read here."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec

from ktcli.assembly.ready import Ready
from ktcli.chat.conversation import Identity
from ktcli.chat.partner import Held
from ktcli.chat.voice import Voice
from ktcli.engine.drafting import DraftWish, cannot_draft
from ktcli.engine.forms import ABSORBED
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
from ktcli.server.engineclient import Exchange, ServerPlace, facts_of
from ktcli.server.enginewire import (
    PATH,
    Began,
    Clock,
    EngineFacts,
    EngineRequest,
    HeldForm,
    Message,
    NextId,
    ReadOn,
)
from ktcli.store import library
from ktcli.store.places import server_sockets


@dataclass(frozen=True, slots=True)
class ServedSize:
    """See `ModelSize`."""

    vocab: int
    context: int


@dataclass(slots=True)
class ServedIds:
    """What a server is known to hold of a conversation; it keeps that by itself, see `HeldIds`."""

    recurrent: bool
    length: int = 0
    deferred: bytearray = field(default_factory=bytearray)

    @property
    def depths(self) -> bytes:
        return bytes(self.deferred[: self.length]).rstrip(b"\0")

    def begin(self, length: int, depths: bytes) -> None:
        """A prompt of this length was read, with these depths."""
        self.length = length
        self.deferred = bytearray(depths.ljust(length, b"\0"))

    def choose(self, depth: int) -> None:
        """The next id is there, which is computed after it was told; so the one before was."""
        self.length = len(self.deferred)
        self.deferred.append(depth)

    def end(self) -> None:
        """The answer has ended by itself: its last id was computed."""
        self.length = len(self.deferred)

    def keep(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class ServedEngine:
    """What a chat must know of a server's engine, see `AnsweringEngine`.

    Attributes:
        clocks: the server's clocks, as they were said last.
        sequence: what the server is known to hold.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.spec = ServedSize(facts.vocab, facts.model_context)
        self.context = facts.context
        self.clocks: Sequence[Clock] = ()
        self.sequence = ServedIds(facts.recurrent)

    def how_at(self, position: int) -> int:
        """How an id that has come is computed; one that was put in, without deferral, in the form of the last."""
        depths = self.sequence.deferred
        if position < len(depths):
            return depths[position]
        return depths[-1] & ABSORBED if depths else 0

    def operations(self) -> Sequence[Clock]:
        """The server's clocks, as they were said last."""
        return self.clocks


@dataclass(frozen=True, slots=True)
class ServedPartner:
    """See `Partner`.

    Attributes:
        drafts: whether drafts leave answers as they are.
    """

    name: str
    served: ServerPlace
    engine: ServedEngine
    voice: Voice
    asked: str
    pack: str
    drafts: bool
    loading_s: float = 0.0

    @property
    def model(self) -> Identity:
        return Identity(self.name, self.asked or self.name, self.pack)

    def talk(self, draft: DraftWish) -> ServedTalk:
        """Begins a conversation.

        Raises:
            UsageError: drafts were asked for where they could change answers.
        """
        if draft.drafts and draft.asked and not self.drafts:
            raise cannot_draft()
        return ServedTalk(self, draft)


class ServedTalk:
    """A conversation with a server's model, see `Talk`: each request is a connection of its own.

    Attributes:
        began: the server's clocks when it took the last request.
    """

    def __init__(self, partner: ServedPartner, draft: DraftWish) -> None:
        self._partner, self._draft = partner, draft
        self._engine = partner.engine
        self._caller = f"chat {os.getpid()} {secrets.token_hex(4)}"
        self.began: Sequence[Clock] = ()
        self._exchange: Exchange | None = None
        self._answer: Answer | None = None
        self._read = msgspec.json.Decoder(Message)

    @property
    def sequence(self) -> ServedIds:
        return self._engine.sequence

    def submit(
        self, request: GenerationRequest, sampler: Sampler, held: Held | None = None
    ) -> Answer:
        """Sends a request, see `Talk.submit`."""
        body = msgspec.json.encode(
            EngineRequest(
                self._partner.pack,
                list(request.prompt),
                replace(sampler.settings, seed=sampler.seed),
                sampler.drawn,
                list(request.stop_ids),
                request.max_tokens,
                request.depths,
                list(request.marks),
                self._draft,
                None if held is None else HeldForm(held.form, held.prompt, list(held.said)),
                self._caller,
                request.said,
                request.shared,
            )
        )
        self._exchange = Exchange(self._partner.served, f"{PATH}/generate", body)
        self._answer = Answer(request, 0, sampler)
        return self._answer

    def step(self) -> list[Event]:
        """The events that came."""
        answer, exchange = self._answer, self._exchange
        if answer is None or exchange is None:
            return []
        if answer.cancelled:
            return [self._end(answer, Finish.CANCELLED)]
        events: list[Event] = []
        try:
            for line in exchange.lines():
                events += self._heard(answer, self._read.decode(line))
                if answer.finish is not None:
                    return events
            if exchange.ended:
                raise self._partner.served.gone()
        except msgspec.DecodeError as error:
            said = KtError(
                f"the server of {self._partner.name} is of another version of kt ({error})"
            )
            events.append(self._end(answer, Finish.FAILED, said))
        except KtError as error:
            events.append(self._end(answer, Finish.FAILED, error))
        return events

    def _heard(self, answer: Answer, message: Message) -> list[Event]:
        """The events of a message."""
        if isinstance(message, Began):
            self.began = message.clocks
            return []
        _take(answer.stats, message.stats)
        if isinstance(message, ReadOn):
            self.sequence.length = message.stats.prompt_tokens
            return [PromptRead(answer, message.done, message.total)]
        if isinstance(message, NextId):
            return self._chosen(answer, message)
        self._engine.clocks = message.clocks
        answer.sampler.skip(message.drawn - answer.sampler.drawn)
        finish = Finish(message.finish)
        if finish is Finish.CANCELLED:  # not from here: the server ends
            raise self._partner.served.gone()
        if finish is Finish.FAILED:
            raise KtError(message.failure.error, hint=message.failure.hint)
        if answer.ids:
            self.sequence.end()
        return [self._end(answer, finish)]

    def _chosen(self, answer: Answer, message: NextId) -> list[Event]:
        """Takes an id; what the conversation ends with it the server need not know."""
        if not answer.ids:
            self._engine.clocks, answer.depths = message.clocks, message.depths
            self.sequence.begin(len(answer.request.prompt), message.depths)
        self.sequence.choose(message.defer)
        answer.ids.append(message.id)
        if not answer.sampler.settings.is_greedy:
            answer.sampler.skip(1)
        events: list[Event] = [Token(answer, message.id)]
        if answer.request.ends(message.id):
            # Of a step that gave more ids, the others do not count.
            answer.stats.accepted -= answer.stats.tokens - len(answer.ids)
            answer.stats.tokens = len(answer.ids)
            events.append(self._end(answer, Finish.STOP))
        return events

    def _end(self, answer: Answer, finish: Finish, error: Exception | None = None) -> Finished:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._answer = None
        answer.finish = finish
        return Finished(answer, finish, error)


def _take(stats: Stats, said: Stats) -> None:
    """Takes over what a server counted."""
    for each in fields(Stats):
        setattr(stats, each.name, getattr(said, each.name))


def find(ready: Ready) -> tuple[ServerPlace, EngineFacts | None] | None:
    """The server of this library that has a model loaded, the one with the longest context, and what it says of it;
    else the first that can load it, and None. None alone: no server has it."""
    pack, loaded, others = library.identity(ready.pack), [], []
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
        speaker: the partner of the chat.
        place: where the model is.
        keeps_pages: false, as the server keeps them.
        held_bytes: the memory that is free when it is left.
    """

    def __init__(
        self, ready: Ready, served: ServerPlace, facts: EngineFacts, voice: Voice, asked: str
    ) -> None:
        self.ready = ready
        self.speaker = ServedPartner(
            ready.name, served, ServedEngine(facts), voice, asked, facts.pack, facts.drafts
        )
        self.place = f"served at port {served.port}"
        self.keeps_pages = False
        self.held_bytes = 0

    def forget(self) -> None:
        """Does nothing: another process holds the memory."""

    def close(self) -> None:
        """Does nothing: the server goes on."""
