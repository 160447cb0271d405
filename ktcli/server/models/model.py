"""A model that is served: its engine on a thread of its own, its text files, and leases that prevent its unloading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import field, replace

from ktcli.adapters.packed import PackedAdapter
from ktcli.answers.grammar.compiler import GrammarCompiler
from ktcli.assembly.beside import MemoryFit
from ktcli.assembly.presets import preset_over, with_system
from ktcli.assembly.talking import OpenModel
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.scheduler import Limits
from ktcli.errors import DeviceError
from ktcli.records import dataclass
from ktcli.server.models.adapters import Borrowed, ServedAdapters
from ktcli.server.models.enginethread import EngineThread, LoopQueue
from ktcli.server.models.prompts import ChatRequest, PromptMaker, PromptSource
from ktcli.server.models.source import FOREVER, ModelFacts, ModelSource
from ktcli.store.preset import NOTHING, Preset
from ktcli.text.settings import Settings


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
        self, backend: LocalBackend, limits: Limits, read_adapter: Callable[[str], PackedAdapter]
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
        if engine.adapters is not None and engine.pools.adapter is None:
            self.adapters = ServedAdapters(self.thread, engine.adapters, read_adapter)

    def close(self) -> None:
        """Cancels the model's answers, and ends its threads; not to be called in the event loop."""
        self.thread.close()
        self.grammars.close()

    def forget(self) -> None:
        """Drops the references to the engine, after `close`, so that its memory can be freed."""
        del self.backend, self.thread, self.prompts, self.grammars, self.adapters


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model that is in memory.

    Attributes:
        facts: of its files, which may have been removed since.
        keep_s: the seconds that it stays there when nobody uses it.
        leases: how many use it.
        used_s: when the last of them ended, `time.monotonic`.
    """

    source: ModelSource
    model: ServedModel
    opened: OpenModel
    fit: MemoryFit
    facts: ModelFacts
    keep_s: float
    changed: asyncio.Event
    leases: int = 0
    used_s: float = field(default_factory=time.monotonic)

    @property
    def failure(self) -> DeviceError | None:
        """The error with which the model's GPU failed, after which it answers nothing; None: its GPU has not failed."""
        return self.model.thread.failure

    @property
    def is_idle(self) -> bool:
        """Whether the model can answer and no request uses it."""
        return not self.leases and self.failure is None

    @property
    def due_s(self) -> float:
        """The time at which the model is unloaded unless it is used before, in seconds of `time.monotonic`."""
        return self.used_s + self.keep_s

    @property
    def expires(self) -> int | None:
        """The time at which the model is unloaded unless it is used from now on, in seconds since 1970; None: never."""
        if self.keep_s == FOREVER:
            return None
        left = self.keep_s if self.leases else self.due_s - time.monotonic()
        return int(time.time() + left)


class Lease:
    """A reference that keeps a model in memory until it is released; in a `with` statement until its end. For the event
    loop.

    Attributes:
        name: the name of the model, with its adapter.
        preset: what the name presets under which the model was asked for.
        adapter: the adapter that it was asked for with; None: without one.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded: LoadedModel | None = loaded
        self.model = loaded.model
        self.preset: Preset = NOTHING
        self.adapter: Borrowed | None = None
        self.name = loaded.model.name
        loaded.leases += 1

    @property
    def settings(self) -> Settings:
        """The settings of answers (sampling, stop strings, length): the model's own, overridden by those of the
        preset."""
        return preset_over(self.preset, self.model.texts.settings)

    def of_messages(self, asked: ChatRequest) -> PromptSource:
        """Returns a function that makes the prompt of a conversation, which begins with the preset's system text unless
        it has one of its own."""
        whole = replace(asked, messages=with_system(self.preset, asked.messages))
        return lambda prompts: prompts.of_messages(whole)

    def again(self) -> Lease:
        """Returns another lease of the same model, to be released separately.

        Raises:
            ValueError: this one has ended.
        """
        if self._loaded is None:
            raise ValueError("the lease has ended")
        made = Lease(self._loaded)
        made.adapter, made.name = self.adapter and self.adapter.again(), self.name
        return made

    def release(self) -> None:
        """Ends the lease, so that its model may be unloaded; a second call does nothing."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if self.adapter is not None:
                self.adapter.give_back()
            loaded.leases -= 1
            if not loaded.leases:
                loaded.used_s = time.monotonic()
                loaded.changed.set()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
