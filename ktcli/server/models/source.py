"""The source of a served model: what is needed to load one, and the conversions in the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ktcli.adapters.packed import PackedAdapter
from ktcli.assembly.adapters import digest_of
from ktcli.assembly.beside import HeldMemory, MemoryFit, fit_beside
from ktcli.assembly.listener import Bar, Listener
from ktcli.assembly.ready import Ready
from ktcli.assembly.talking import Opening, after_failure, open_read
from ktcli.dialogue.local import LocalBackend
from ktcli.errors import Busy, DeviceError, NotFound
from ktcli.manifest import PACK
from ktcli.models import build
from ktcli.models.pooling import TextPooling, read_pooling
from ktcli.records import dataclass
from ktcli.store import adapters, catalog, library
from ktcli.text.model import TextModel, read_text_model
from ktcli.text.tokenizer import Tokenizer, load_tokenizer
from ktcli.weights.pack import Pack

FOREVER = float("inf")  # seconds that a model stays in memory


class Opened(Protocol):
    """A model that is loaded."""

    backend: LocalBackend

    def read_adapter(self, name: str) -> PackedAdapter:
        """Returns an adapter of the library, read for this model; callable from any thread.

        Raises:
            KtError: there is none of this name for the model, or it cannot be used beside it.
        """

    def close(self) -> None:
        """Writes the pages that are to be stored, and closes the model."""

    def forget(self) -> None:
        """Drops the reference to the backend, so that its memory can be freed."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model that are known without loading it.

    Attributes:
        context: the most positions that it was made for.
        size_bytes: its weights, as they are stored.
        identity: equal ones have the same weights in the same formats.
        made: when it was converted, seconds since 1970.
        pooling: how it makes embeddings; None: it generates text.
        hidden: the width of its hidden rows: the length of its embeddings.
    """

    family: str
    context: int
    vocab: int
    size_bytes: int
    identity: str
    made: int
    pooling: TextPooling | None = None
    hidden: int = 0

    @property
    def task(self) -> str:
        """Its task, in Ollama's words."""
        return "completion" if self.pooling is None else "embedding"


class ModelSource(Protocol):
    """A model that can be loaded."""

    @property
    def name(self) -> str:
        """The name for people and clients."""

    @property
    def key(self) -> str:
        """The unique key of the model."""

    @property
    def keep_s(self) -> float:
        """The seconds that it stays in memory without use, unless a request says otherwise."""

    @property
    def adapter(self) -> str:
        """The adapter of the library that is attached for its requests; empty: none."""

    def facts(self) -> ModelFacts:
        """Returns the facts of the model; callable from any thread.

        Raises:
            KtError: its files are damaged.
        """

    def fit(self, held: HeldMemory) -> MemoryFit:
        """Returns how the model fits into memory; callable from any thread.

        Raises:
            KtError: its files are damaged, or an option does not fit it.
        """

    def after_failure(self, error: DeviceError) -> str:
        """Returns the device on which the model runs after its GPU failed; empty: none. See `talking.after_failure`."""

    def read_tokenizer(self) -> Tokenizer:
        """Returns its tokenizer, read in some seconds; callable from any thread.

        Raises:
            KtError: its files are damaged.
        """

    def read_text_model(self, tokenizer: Tokenizer) -> TextModel:
        """Returns its text files, read on the main thread, which alone can stop a template.

        Raises:
            KtError: its files are damaged.
        """

    def open(self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]) -> Opened:
        """Returns the model, loaded; callable from any thread.

        Args:
            is_stopped: asked while it is loaded; true: nobody wants it any more.
        Raises:
            KtError: it cannot be loaded, or was stopped.
        """


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A conversion of the library.

    Attributes:
        asked: the name that finds it again.
        shorter: whether its context may be shorter than the one that is wanted, where it was made for fewer positions.
    """

    ready: Ready
    asked: str
    how: Opening
    keep_s: float
    shorter: bool = False

    @property
    def name(self) -> str:
        """The name for people and clients."""
        return self.ready.name

    @property
    def key(self) -> str:
        """The unique key of the model: the path of its pack, and the adapter that it is loaded with."""
        own = self.ready.adapter
        return f"{self.ready.pack}+{own}" if own else str(self.ready.pack)

    @property
    def adapter(self) -> str:
        """The empty name: its requests use the engine as it was loaded."""
        return ""

    def facts(self) -> ModelFacts:
        """Returns the facts of the model, read from its pack."""
        try:
            made = (self.ready.pack / PACK).stat().st_mtime_ns
        except OSError as error:
            raise NotFound(f"{self.name} is no longer in the library") from error
        found = _facts_of(self.ready.pack, made)
        if not self.ready.adapter:
            return found
        digest = digest_of(adapters.resolve(self.ready.adapter))
        return replace(found, identity=f"{found.identity}+{digest}")

    def fit(self, held: HeldMemory) -> MemoryFit:
        """Returns how the model fits into memory next to the models already there."""
        wanted, how = self.how.wanted, self.how
        if self.shorter and wanted.context is not None:
            context = min(wanted.context, self.facts().context)
            how = replace(how, wanted=replace(wanted, context=context))
        return fit_beside(self.ready, how, held)

    def after_failure(self, error: DeviceError) -> str:
        """Returns the device on which the model runs after its GPU failed; empty: none."""
        return after_failure(error, self.how)

    def read_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, read from the pack."""
        return load_tokenizer(self.ready.pack)

    def read_text_model(self, tokenizer: Tokenizer) -> TextModel:
        """Returns the other text files, read from the pack."""
        return read_text_model(self.ready.name, self.ready.pack, tokenizer=tokenizer)

    def open(self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]) -> Opened:
        """Returns the model, loaded with the context that fits; stops when `is_stopped` returns True."""
        how = self.how
        wanted = replace(how.wanted, context=fit.context)
        listener = _Stoppable(how.listener, is_stopped)
        return open_read(
            self.ready, texts, self.asked, replace(how, wanted=wanted, listener=listener)
        )


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A model served with several adapters, as one of them: the same engine, to which the adapter is attached."""

    of: StoredModel
    adapter: str

    @property
    def name(self) -> str:
        """The name for people and clients."""
        return f"{self.of.name}+{self.adapter}"

    @property
    def key(self) -> str:
        """The key of the model with the engine."""
        return self.of.key

    @property
    def keep_s(self) -> float:
        """The seconds that the model stays in memory."""
        return self.of.keep_s

    def facts(self) -> ModelFacts:
        """Returns the facts of the model."""
        found = self.of.facts()
        return replace(found, identity=f"{found.identity}+{self.digest}")

    @property
    def digest(self) -> str:
        """The SHA-256 of the adapter's files, from the library.

        Raises:
            NotFound, BadCheckpoint: it is no longer there, or damaged.
        """
        return digest_of(adapters.resolve(self.adapter))

    def fit(self, held: HeldMemory) -> MemoryFit:
        """Returns how the model fits into memory next to the models already there."""
        return self.of.fit(held)

    def after_failure(self, error: DeviceError) -> str:
        """Returns the device on which the model runs after its GPU failed; empty: none."""
        return self.of.after_failure(error)

    def read_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, read from the pack."""
        return self.of.read_tokenizer()

    def read_text_model(self, tokenizer: Tokenizer) -> TextModel:
        """Returns the other text files, read from the pack."""
        return self.of.read_text_model(tokenizer)

    def open(self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]) -> Opened:
        """Returns the model, loaded without an attached adapter."""
        return self.of.open(texts, fit, is_stopped)


@lru_cache(256)
def _facts_of(path: Path, made_ns: int) -> ModelFacts:
    pack = Pack.open(path)
    model = build(pack.config)
    spec = model.spec
    return ModelFacts(
        spec.family,
        spec.context,
        spec.vocab,
        pack.size_bytes,
        library.identity(path),
        made_ns // 10**9,
        _as_known(model.pooling, pack),
        spec.hidden,
    )


def _as_known(pooling: TextPooling | None, pack: Pack) -> TextPooling | None:
    """Returns a model's pooling, with what the catalogue knows of it: that its vectors may be shortened, which few
    models' files say."""
    source = pack.manifest
    if pooling is None or pooling.any_length or pooling.lengths or not source.repository:
        return pooling
    profile = catalog.by_repository(source.hub, source.repository)
    known = (
        None if profile is None else read_pooling(profile.config, build(pack.config).spec.hidden)
    )
    return pooling if known is None else replace(pooling, any_length=known.any_length)


class _Stoppable:
    """A listener whose progress stops the work when it is asked to."""

    def __init__(self, listener: Listener, is_stopped: Callable[[], bool]) -> None:
        self._listener, self._is_stopped = listener, is_stopped
        self.note, self.warn = listener.note, listener.warn

    def agree(self, offer: Iterable[str], command: str) -> None:
        self._listener.agree(offer, command)

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        return self._bar(self._listener.progress(title, total, unit=unit, done=done))

    @contextmanager
    def _bar(self, inner: AbstractContextManager[Bar]) -> Iterator[Bar]:
        with inner as bar:
            yield _StoppableBar(bar, self._is_stopped)


class _StoppableBar:
    def __init__(self, bar: Bar, is_stopped: Callable[[], bool]) -> None:
        self._bar, self._is_stopped = bar, is_stopped

    def advance(self, amount: int = 1) -> None:
        self._check()
        self._bar.advance(amount)

    def update(self, *, done: int, total: int | None = None) -> None:
        self._check()
        self._bar.update(done=done, total=total)

    def _check(self) -> None:
        if self._is_stopped():
            raise Busy("the server is shutting down", hint="try again once it has restarted")
