"""A model that is served: its engine on a thread of its own, and its texts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ktcli.chat.grammar.compiler import GrammarCompiler
from ktcli.chat.speaker import Speaker
from ktcli.server.enginethread import EngineThread
from ktcli.server.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served.

    Attributes:
        thread: runs its engine.
        prompts: makes ids of conversations, on the main thread.
        created: when it was loaded, seconds since 1970.
        grammars: compiles what answers must be, on threads of its own.
    """

    speaker: Speaker
    thread: EngineThread
    prompts: PromptMaker
    created: int = field(default_factory=lambda: int(time.time()))
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", GrammarCompiler.of(self.speaker))

    @property
    def name(self) -> str:
        return self.speaker.name
