"""Declares the interface of whatever answers a conversation: a model in this process, or in a server.

The seam is the ids: messages are rendered and answers read on this side of it, so that a conversation is the same with
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ktcli.engine.drafting import DraftOptions
from ktcli.engine.request import Answer, Event, GenerationRequest
from ktcli.engine.sampler import Sampler
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.answers.format import AnswerFormat
    from ktcli.answers.grammar.form import AnswerConstraint
    from ktcli.text.model import TextModel

Clocks = Sequence[tuple[str, int]]  # (operation, nanoseconds so far) pairs, see `Engine.operations`


@dataclass(frozen=True, slots=True)
class Identity:
    """The model that a conversation was held with.

    Attributes:
        name: the name for people.
        asked: the name that finds it again: a short one, a repository, a folder.
        pack: the identity of the conversion; empty: unknown.
        server: the address of the server that has it, whose name `asked` is; empty: it is here.
    """

    name: str = ""
    asked: str = ""
    pack: str = ""
    server: str = ""


class ModelSize(Protocol):
    """The figures of a model's shape that a conversation needs."""

    @property
    def vocab(self) -> int:
        """The number of token ids of the model: the columns of its logits."""

    @property
    def context(self) -> int:
        """The most positions, in tokens, that the model was made for."""


class AnsweringEngine(Protocol):
    """The part of an engine that a conversation needs, see `Engine`."""

    @property
    def spec(self) -> ModelSize:
        """The sizes of the model: its vocabulary and its context."""

    @property
    def context(self) -> int:
        """The most positions, in tokens, that a conversation can have in this engine."""

    def operations(self) -> Clocks:
        """Returns pairs (name of an operation, nanoseconds spent on it so far)."""


class ChatSession(Protocol):
    """The requests of one conversation to a model, one after the other, and their events."""

    @property
    def began(self) -> Clocks:
        """The engine's times when the last request was submitted: pairs (name of an operation, nanoseconds so far)."""

    def submit(
        self,
        request: GenerationRequest,
        sampler: Sampler,
        constraint: AnswerConstraint | None = None,
    ) -> Answer:
        """Submits a request to the model; returns the state of its answer, whose events `step` returns.

        Args:
            sampler: the random sequence that the answer goes on with.
            constraint: what the answer must be; None: anything.
        Raises:
            KtError: as `Scheduler.submit`; or the answer cannot be constrained so, or nobody is there to answer.
        """

    def step(self) -> list[Event]:
        """Returns the new events of the last request, such as its next tokens; the list may be empty."""

    def keep(self) -> None:
        """Stores the conversation's last computed state in the cache, so that another prompt that begins with the same
        ids can reuse it.
        """

    def close(self) -> None:
        """Releases what the engine holds of the conversation, such as cache pages."""

    def abandon(self) -> None:
        """Releases what the engine holds of the conversation at its next operation; unlike `close`, the garbage
        collector may call it, at any time and in any thread.
        """


class ChatBackend(Protocol):
    """The interface of a model that answers a conversation."""

    @property
    def name(self) -> str:
        """The model's name for people."""

    @property
    def engine(self) -> AnsweringEngine:
        """The engine that computes the model's answers."""

    @property
    def texts(self) -> TextModel:
        """The model's text files, read: tokenizer, chat template, settings."""

    @property
    def answers(self) -> AnswerFormat:
        """The format in which the model writes its answers."""

    @property
    def recurrent(self) -> bool:
        """Whether some layer of the model keeps a recurrent state instead of a cache entry for each position."""

    @property
    def loading_s(self) -> float:
        """The seconds that loading the model took."""

    @property
    def model(self) -> Identity:
        """The identity of the model in saved conversations: its names, its conversion, its server."""

    def session(self, draft: DraftOptions) -> ChatSession:
        """Returns a new session for a conversation.

        Args:
            draft: the options of speculative decoding.
        Raises:
            UsageError: drafts were asked for where they could change answers.
        """


def longer_context(engine: AnsweringEngine) -> str:
    """Returns a sentence for people on how to have a longer context: by an option, or not at all if the model supports
    no more.
    """
    most = engine.spec.context
    if engine.context < most:
        return f"--context gives more room, up to {most:,} tokens"
    return f"this model supports at most {most:,} tokens"
