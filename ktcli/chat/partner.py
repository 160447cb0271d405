"""Declares what a chat needs of whoever answers it: a model in this process, or one that a server holds.

The seam is the ids: a chat renders, counts and reads answers itself, so that a conversation is the same with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ktcli.engine.drafting import DraftWish
from ktcli.engine.request import Answer, Event, GenerationRequest
from ktcli.engine.sampler import Sampler

if TYPE_CHECKING:
    from ktcli.chat.conversation import Identity
    from ktcli.chat.grammar.form import Form
    from ktcli.chat.voice import Voice


class ModelSize(Protocol):
    """What a chat must know of a model's shape."""

    @property
    def vocab(self) -> int:
        """The number of ids."""

    @property
    def context(self) -> int:
        """The most positions that the model was made for."""


class AnsweringEngine(Protocol):
    """What a chat must know of an engine, see `Engine`."""

    @property
    def spec(self) -> ModelSize: ...

    @property
    def context(self) -> int: ...

    def how_at(self, position: int) -> int: ...

    def operations(self) -> Sequence[tuple[str, int]]: ...


class HeldIds(Protocol):
    """What an engine holds of a conversation, see `engine.sequence.Sequence`."""

    @property
    def length(self) -> int: ...

    @property
    def depths(self) -> bytes: ...

    @property
    def recurrent(self) -> bool: ...

    def keep(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to.

    Attributes:
        form: what its text must be, behind its thoughts.
        prompt: the text before the answer.
        said: the ids of the answer that are there already.
    """

    form: Form
    prompt: str
    said: tuple[int, ...] = ()


class Talk(Protocol):
    """One conversation with a model: requests one after the other, and their events."""

    @property
    def sequence(self) -> HeldIds:
        """What the engine holds of it."""

    @property
    def began(self) -> Sequence[tuple[str, int]]:
        """The engine's clocks when it took the last request, see `AnsweringEngine.operations`."""

    def submit(
        self, request: GenerationRequest, sampler: Sampler, held: Held | None = None
    ) -> Answer:
        """Takes a request; its events come from `step`.

        Args:
            sampler: the random sequence that the answer goes on with.
        Raises:
            KtError: as `Scheduler.submit`; or the answer cannot be held to that, or nobody is there to answer.
        """

    def step(self) -> list[Event]:
        """Returns what happened to the request, soon: perhaps nothing."""


class Partner(Protocol):
    """A model that answers a chat."""

    @property
    def name(self) -> str:
        """The name for people."""

    @property
    def engine(self) -> AnsweringEngine: ...

    @property
    def voice(self) -> Voice:
        """Its text files, read."""

    @property
    def loading_s(self) -> float:
        """The seconds that loading it took."""

    @property
    def model(self) -> Identity:
        """The model, as a kept conversation names it."""

    def talk(self, draft: DraftWish) -> Talk:
        """Begins a conversation.

        Raises:
            UsageError: drafts were asked for where they could change answers.
        """
