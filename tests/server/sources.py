"""Models that follow a script, as what a server loads, in a memory that has room for some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ktcli.adapters.packed import PackedAdapter
from ktcli.assembly.beside import HeldMemory, MemoryFit
from ktcli.dialogue.local import LocalBackend
from ktcli.errors import DeviceError, KtError
from ktcli.server.models.source import FOREVER, ModelFacts
from ktcli.text.model import TextModel
from ktcli.text.tokenizer import Tokenizer


@dataclass
class ScriptedOpened:
    """A scripted model that is open.

    Attributes:
        closed: how often it was closed.
    """

    backend: LocalBackend
    source: ScriptedModel

    def read_adapter(self, name: str) -> PackedAdapter:
        raise NotImplementedError

    def close(self) -> None:
        assert self.source.closing.wait(60)
        self.source.log.append(f"close {self.source.name}")

    def forget(self) -> None:
        del self.backend


@dataclass
class ScriptedModel:
    """A model that follows a script.

    Attributes:
        need_bytes: what it takes of `memory_bytes`, which models in memory share.
        log: what was loaded and closed.
        fails: what loading it raises; None: it does not fail.
        gate: what loading it waits for; a stopped load does not.
        closing: what closing it waits for.
        reading: what reading its tokenizer waits for.
        goes_on: where it goes on after its GPU failed.
    """

    backend: LocalBackend
    keep_s: float = FOREVER
    need_bytes: int = 1
    memory_bytes: int = 1 << 40
    log: list[str] = field(default_factory=list)
    fails: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    reading: threading.Event = field(default_factory=threading.Event)
    goes_on: str = "on the CPU"

    def __post_init__(self) -> None:
        self.gate.set()
        self.closing.set()
        self.reading.set()

    @property
    def name(self) -> str:
        return self.backend.name

    adapter = ""

    @property
    def key(self) -> str:
        return self.backend.name

    def facts(self) -> ModelFacts:
        engine = self.backend.engine
        pack = self.backend.pack
        return ModelFacts("fake", engine.context, engine.spec.vocab, self.need_bytes, pack, 0)

    def fit(self, held: HeldMemory) -> MemoryFit:
        free = self.memory_bytes - held.taken_bytes
        return MemoryFit(
            self.need_bytes, self.need_bytes, free, self.memory_bytes, self.need_bytes <= free
        )

    def after_failure(self, error: DeviceError) -> str:
        self.log.append(f"{self.name} failed")
        return self.goes_on

    def read_tokenizer(self) -> Tokenizer:
        assert self.reading.wait(60)
        return self.backend.texts.tokenizer

    def read_text_model(self, tokenizer: Tokenizer) -> TextModel:
        return self.backend.texts

    def open(
        self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]
    ) -> ScriptedOpened:
        while not self.gate.wait(0.005):
            if is_stopped():
                raise KtError("stopped")
        if self.fails is not None:
            raise self.fails
        self.log.append(f"load {self.name}")
        return ScriptedOpened(self.backend, self)
