"""A model that is served: its engine on a thread of its own, and its texts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from ktcli.chat.grammar.compiler import GrammarCompiler
from ktcli.chat.speaker import Speaker
from ktcli.engine.scheduler import Limits
from ktcli.server.enginethread import EngineThread
from ktcli.server.mail import Mail
from ktcli.server.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served.

    Attributes:
        thread: runs its engine.
        mail: carries what that thread says to the event loop.
        created: when it was loaded, seconds since 1970.
        prompts: makes ids of conversations, on the main thread.
        grammars: compiles what answers must be, on threads of its own.
    """

    speaker: Speaker
    thread: EngineThread
    mail: Mail
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: PromptMaker = field(init=False)
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", PromptMaker(self.speaker))
        object.__setattr__(self, "grammars", GrammarCompiler.of(self.speaker))

    @classmethod
    def start(cls, speaker: Speaker, limits: Limits) -> ServedModel:
        """Starts the thread of a model that is loaded, for the event loop that runs."""
        mail = Mail(asyncio.get_running_loop())
        return cls(speaker, EngineThread(speaker.engine, limits, mail.send), mail)

    @property
    def name(self) -> str:
        return self.speaker.name
