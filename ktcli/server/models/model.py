"""A model that is served: its engine on a separate thread, and its text files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ktcli.adapters.packed import PackedAdapter
from ktcli.answers.grammar.compiler import GrammarCompiler
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.scheduler import Limits
from ktcli.server.models.adapters import ServedAdapters
from ktcli.server.models.enginethread import EngineThread
from ktcli.server.models.loopqueue import LoopQueue
from ktcli.server.models.prompts import PromptMaker


class ServedModel:
    """A model that is served; to be created in the event loop that receives its answers.

    Attributes:
        name: the name for people and clients.
        texts, answers: its text files, and how it writes answers. They and the name outlive `forget`: answers that are
            still being sent need them.
        created: when it was loaded, seconds since 1970.
        thread: runs its engine.
        queue: carries the events of that thread to the event loop.
        prompts: makes ids of conversations, on the main thread.
        grammars: compiles what answers must be, on threads of its own.
        adapters: those that requests may name; None: the engine has no room for any.

    Args:
        read_adapter: reads an adapter by its name; on any thread.
    """

    def __init__(
        self,
        backend: LocalBackend,
        limits: Limits,
        read_adapter: Callable[[str], PackedAdapter] | None = None,
    ) -> None:
        self.name, self.created = backend.name, int(time.time())
        self.texts, self.answers = backend.texts, backend.answers
        self.backend = backend
        self.prompts = PromptMaker(backend)
        self.grammars = GrammarCompiler.of(backend.answers, backend.engine.spec.vocab)
        self.queue = LoopQueue(asyncio.get_running_loop())
        self.thread = EngineThread(backend.engine, limits, self.queue.flush)
        self.adapters = None
        engine = backend.engine
        if read_adapter and engine.adapters is not None and engine.pools.adapter is None:
            self.adapters = ServedAdapters(self.thread, engine.adapters, read_adapter)

    def close(self) -> None:
        """Cancels its answers, and ends its threads; not to be called in the event loop."""
        self.thread.close()
        self.grammars.close()

    def forget(self) -> None:
        """Drops the references to the engine, after `close`, so that its memory can be freed."""
        del self.backend, self.thread, self.prompts, self.grammars, self.adapters
