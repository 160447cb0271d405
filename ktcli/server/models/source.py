"""The source of a served model: a conversion of the library, and what is needed to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from ktcli.assembly.adapters import digest_of
from ktcli.assembly.beside import HeldMemory, MemoryFit, fit_beside
from ktcli.assembly.ready import Ready
from ktcli.assembly.talking import Opening, OpenModel, after_failure, open_read
from ktcli.errors import DeviceError, NotFound
from ktcli.manifest import PACK
from ktcli.models import build
from ktcli.models.pooling import TextPooling, read_pooling
from ktcli.records import dataclass
from ktcli.server.process.drain import shutting_down
from ktcli.server.process.supervisor import WatchedListener
from ktcli.store import adapters, catalog, library
from ktcli.text.model import TextModel, read_text_model
from ktcli.text.tokenizer import Tokenizer, load_tokenizer
from ktcli.weights.pack import Pack

FOREVER = float("inf")  # seconds that a model stays in memory


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
        """The task of the model, in Ollama's words: "completion" if it generates text, else "embedding"."""
        return "completion" if self.pooling is None else "embedding"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A conversion of the library that can be loaded; its methods may be called from any thread unless they say
    otherwise.

    Attributes:
        asked: the name that finds it again.
        keep_s: the seconds that it stays in memory without use, unless a request says otherwise.
        shorter: whether its context may be shorter than the one that is wanted, where it was made for fewer positions.
        adapter: the adapter of the library that is attached to its engine for its requests; empty: none, they use the
            engine as it was loaded.
    """

    ready: Ready
    asked: str
    how: Opening
    keep_s: float
    shorter: bool = False
    adapter: str = ""

    @property
    def name(self) -> str:
        """The name of the model for people and clients, followed by +ADAPTER if requests use an adapter."""
        return f"{self.ready.name}+{self.adapter}" if self.adapter else self.ready.name

    @property
    def key(self) -> str:
        """The unique key of the model's engine: the path of its pack, followed by +ADAPTER if it is loaded with one."""
        own = self.ready.adapter
        return f"{self.ready.pack}+{own}" if own else str(self.ready.pack)

    def facts(self) -> ModelFacts:
        """Returns the facts of the model, such as its family, size and context, read from its pack.

        Raises:
            KtError: its files are damaged, or not there any more.
        """
        try:
            made = (self.ready.pack / PACK).stat().st_mtime_ns
        except OSError as error:
            raise NotFound(f"{self.ready.name} is no longer in the library") from error
        found = _facts_of(self.ready.pack, made)
        for name in filter(None, (self.ready.adapter, self.adapter)):
            found = replace(found, identity=f"{found.identity}+{adapter_digest(name)}")
        return found

    def fit(self, held: HeldMemory) -> MemoryFit:
        """Returns how the model fits into memory, and with which context, next to the models already there (`held`).

        Raises:
            KtError: its files are damaged, or an option cannot be used with it.
        """
        wanted, how = self.how.wanted, self.how
        if self.shorter and wanted.context is not None:
            context = min(wanted.context, self.facts().context)
            how = replace(how, wanted=replace(wanted, context=context))
        return fit_beside(self.ready, how, held)

    def after_failure(self, error: DeviceError) -> str:
        """Chooses where the model runs when it is loaded again after its GPU failed; returns that as a phrase, such as
        "on the CPU"; empty: it cannot run anywhere. See `talking.after_failure`."""
        return after_failure(error, self.how)

    def read_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer, read from the pack in some seconds. Raises: KtError: its files are damaged."""
        return load_tokenizer(self.ready.pack)

    def read_text_model(self, tokenizer: Tokenizer) -> TextModel:
        """Returns the model's chat template and other text files with its tokenizer, read from the pack on the main
        thread, which alone can stop a template.

        Raises:
            KtError: they are damaged.
        """
        return read_text_model(self.ready.name, self.ready.pack, tokenizer=tokenizer)

    def open(self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]) -> OpenModel:
        """Returns the model, loaded into memory with the context of `fit`, without `adapter`.

        Args:
            is_stopped: called while the model is loaded; true stops loading.
        Raises:
            KtError: it cannot be loaded, or was stopped.
        """
        how = self.how
        wanted = replace(how.wanted, context=fit.context)

        def go_on(done: int, total: int | None) -> None:
            if is_stopped():
                raise shutting_down()

        listener = WatchedListener(how.listener, lambda title: go_on)
        return open_read(
            self.ready, texts, self.asked, replace(how, wanted=wanted, listener=listener)
        )


def adapter_digest(adapter: str) -> str:
    """Returns the SHA-256 of the files of the library's adapter with this name.

    Raises:
        NotFound, BadCheckpoint: it is no longer there, or damaged.
    """
    return digest_of(adapters.resolve(adapter))


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
