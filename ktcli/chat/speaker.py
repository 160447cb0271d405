"""A loaded model that can talk: its engine, and its text files, read."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.chat.conversation import Identity
from ktcli.chat.partner import AnsweringEngine, Talk
from ktcli.chat.voice import Voice
from ktcli.engine import Engine
from ktcli.engine.drafting import DraftWish


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model that can talk.

    Attributes:
        name: the name for people.
        asked: the name that finds it again; empty: the same.
        pack: the identity of its conversion; empty: unknown.
        loading_s: the seconds that its engine took to be loaded.
    """

    name: str
    engine: Engine
    voice: Voice
    asked: str = ""
    pack: str = ""
    loading_s: float = 0.0

    @property
    def model(self) -> Identity:
        """The model, as a kept conversation names it."""
        return Identity(self.name, self.asked or self.name, self.pack)

    def talk(self, draft: DraftWish) -> Talk:
        """Begins a conversation, see `Partner.talk`."""
        from ktcli.chat.owntalk import OwnTalk  # who talks to a server needs no scheduler

        return OwnTalk(self.engine, self.voice, draft)


def longer_context(engine: AnsweringEngine) -> str:
    """The advice for a longer conversation: an option, unless the model itself ends there."""
    most = engine.spec.context
    if engine.context < most:
        return f"--context gives more room, up to {most:,} tokens"
    return f"{most:,} tokens are the most that this model was made for"
