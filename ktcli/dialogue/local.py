"""A model loaded in this process that can answer: its engine and its text files."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ktcli.answers.format import AnswerFormat
from ktcli.dialogue.backend import ChatSession, Identity
from ktcli.engine import Engine
from ktcli.engine.drafting import DraftOptions
from ktcli.records import dataclass
from ktcli.text.model import TextModel

if TYPE_CHECKING:
    from ktcli.dialogue.shared import SharedScheduler


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A model loaded in this process, see `ChatBackend`.

    Attributes:
        name: the name for people.
        asked: the name that finds it again; empty: the same.
        pack: the identity of its conversion; empty: unknown.
        loading_s: the seconds that its engine took to be loaded.
        shared: what makes the engine's steps for all that ask; None: one conversation at a time asks.
        answers: how it writes its answers.
    """

    name: str
    engine: Engine
    texts: TextModel
    asked: str = ""
    pack: str = ""
    loading_s: float = 0.0
    shared: SharedScheduler | None = field(default=None, repr=False, compare=False)
    answers: AnswerFormat = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", AnswerFormat.of(self.texts))

    @property
    def recurrent(self) -> bool:
        """Whether some layer of the model keeps a recurrent state instead of a cache entry for each position."""
        return self.engine.pools.states is not None

    @property
    def model(self) -> Identity:
        """The identity of the model in saved conversations: its names and its conversion."""
        return Identity(self.name, self.asked or self.name, self.pack)

    def session(self, draft: DraftOptions) -> ChatSession:
        """Returns a new session, which sends one conversation's requests to the engine, see `ChatBackend.session`."""
        if self.shared is not None:
            from ktcli.dialogue.shared import SharedSession  # most have an engine for themselves

            return SharedSession(self.shared)
        from ktcli.dialogue.localsession import LocalSession  # a server's model needs no scheduler

        return LocalSession(self.engine, self.answers, draft)
