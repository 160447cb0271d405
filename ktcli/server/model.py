"""A model that is served: its engine on a thread of its own, and its texts."""

from __future__ import annotations

import asyncio
import time

from ktcli.chat.grammar.compiler import GrammarCompiler
from ktcli.chat.speaker import Speaker
from ktcli.engine.scheduler import Limits
from ktcli.server.enginethread import EngineThread
from ktcli.server.mail import Mail
from ktcli.server.prompts import PromptMaker


class ServedModel:
    """A model that is served; made in the event loop that its answers come to.

    Attributes:
        name: the name for people and clients.
        voice: its texts. These two outlive `forget`: answers that are still being sent need them.
        created: when it was loaded, seconds since 1970.
        thread: runs its engine.
        mail: carries what that thread says to the event loop.
        prompts: makes ids of conversations, on the main thread.
        grammars: compiles what answers must be, on threads of its own.
    """

    def __init__(self, speaker: Speaker, limits: Limits) -> None:
        self.name, self.voice, self.created = speaker.name, speaker.voice, int(time.time())
        self.speaker = speaker
        self.prompts = PromptMaker(speaker)
        self.grammars = GrammarCompiler.of(speaker.voice, speaker.engine.spec.vocab)
        self.mail = Mail(asyncio.get_running_loop())
        self.thread = EngineThread(speaker.engine, limits, self.mail.send)

    def close(self) -> None:
        """Cancels its answers, and ends its threads; not for the event loop."""
        self.thread.close()
        self.grammars.close()

    def forget(self) -> None:
        """Lets go of the engine, after `close`, so that its memory is free."""
        del self.speaker, self.thread, self.prompts, self.grammars
