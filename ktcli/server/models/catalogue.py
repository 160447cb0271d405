"""Resolves the model names of requests to models of the library: a client's name never leads to a path or a hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from ktcli.assembly.ready import Ready, is_stale
from ktcli.assembly.talking import Opening
from ktcli.errors import KtError
from ktcli.records import dataclass
from ktcli.server.models.source import ModelSource
from ktcli.store import adapters, library
from ktcli.store.aliases import every as every_alias
from ktcli.store.aliases import preset_of
from ktcli.store.entry import Entry, is_recommended
from ktcli.store.preset import NOTHING, Preset
from ktcli.store.reference import parse, split_adapter

FRESH_S = 2.0  # for which what was read of the library counts
NAME_CHARS = 1000  # longer names are none
_LATEST = ":latest"  # what Ollama's clients write behind names


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """The models of the library, by name.

    Attributes:
        models: those that can be loaded.
        names: what they are called by, in lower case.
        presets: what aliases among these names preset; those that preset nothing are left out.
        unserved: aliases, in lower case, of a model with an adapter that is not served.
    """

    models: Sequence[ModelSource] = ()
    names: Mapping[str, ModelSource] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    unserved: frozenset[str] = frozenset()


class Catalogue:
    """Looks up the models that requests name.

    Args:
        own: the model that the server was started with.
        aliases: further names of it.
        read: reads the library; on any thread.
    """

    def __init__(
        self,
        own: ModelSource,
        aliases: Sequence[str] = (),
        read: Callable[[], ModelIndex] = ModelIndex,
    ) -> None:
        self.own, self.aliases = own, tuple(aliases)
        self._own_names = {each.lower() for each in (own.name, *aliases)}
        self._read = read
        self._index: ModelIndex | None = None
        self._read_s = 0.0
        self._reading = asyncio.Lock()

    async def find(self, name: str) -> ModelSource | None:
        """Returns the model of the server or its library with this name, ignoring case and a final `:latest`; None:
        there is none."""
        if len(name) > NAME_CHARS:
            return None
        said = name.lower()
        said = said if said in self._own_names else said.removesuffix(_LATEST)
        if said in self._own_names:
            return self.own
        names = (await self._fresh()).names
        return names.get(name.lower()) or names.get(said)

    async def is_unserved(self, name: str) -> bool:
        """Returns whether a name that belongs to no model may be that of a LoRA adapter, so that no other model may
        answer for it."""
        said = name.lower().removesuffix(_LATEST)
        return "+" in name or said in (await self._fresh()).unserved

    async def preset(self, name: str) -> Preset:
        """Returns the settings that an alias presets for the requests that name it, with or without `:latest`;
        `NOTHING` for other names, also for those that the server was started with."""
        said = name.lower()
        short = said.removesuffix(_LATEST)
        if len(name) > NAME_CHARS or self._own_names & {said, short}:
            return NOTHING  # without a look at the library
        presets = (await self._fresh()).presets
        return presets.get(said) or presets.get(short, NOTHING)

    async def models(self) -> list[ModelSource]:
        """Returns the models that can be loaded, the server's own first."""
        others = (await self._fresh()).models
        return [self.own, *(each for each in others if each.key != self.own.key or each.adapter)]

    def forget(self) -> None:
        """Clears the cached list of models: the next request reads the library again."""
        self._index = None

    async def _fresh(self) -> ModelIndex:
        async with self._reading:
            if self._index is None or time.monotonic() - self._read_s > FRESH_S:
                self._index = await asyncio.to_thread(self._read)
                self._read_s = time.monotonic()
            return self._index


@dataclass(frozen=True, slots=True)
class LibraryReader:
    """Reads which models of the library can be loaded: those that are converted.

    Attributes:
        own: the model that the server was started with.
        how: how the others are opened.
        keep_s: the seconds that the others stay in memory when nobody uses them.
        adapters: the names of adapters that the server was started with, whatever base they were imported for.
    """

    own: ModelSource
    how: Opening
    keep_s: float
    adapters: Sequence[str] = ()

    def __call__(self) -> ModelIndex:
        found: list[Entry] = []
        aliases: Mapping[Path, Sequence[str]] = {}
        try:
            found = [each for each in library.conversions() if not is_stale(each)]
            aliases = library.called(found)
        except (KtError, OSError) as error:
            self.how.listener.warn(f"the library cannot be read: {error}")
        models: list[ModelSource] = []
        names: dict[str, ModelSource] = {}
        for entry in sorted(found, key=self._preference):
            short = entry.spoken or entry.name
            source = self._source(entry, entry.library_label if short.lower() in names else short)
            models.append(source)
            for name in (short, entry.name, entry.library_label, *aliases.get(entry.path, ())):
                names.setdefault(name.lower(), source)
        adapted = {each.adapter.lower(): each for each in self._adapted()}
        models += adapted.values()
        names |= {each.name.lower(): each for each in adapted.values()}
        meant = self._adapted_aliases(adapted)
        names |= {name: source for name, source in meant.items() if source is not None}
        names = {**adapted, **names}  # an adapter alone, where nothing else is called so
        called = {name.lower() for of_one in aliases.values() for name in of_one} | meant.keys()
        return ModelIndex(
            sorted(models, key=lambda each: each.name),
            names,
            self._presets(called & names.keys()),
            frozenset(name for name, source in meant.items() if source is None),
        )

    def _adapted_aliases(self, served: Mapping[str, ModelSource]) -> dict[str, ModelSource | None]:
        """Returns what aliases of a model with an adapter mean, by their names in lower case; None: what they mean is
        not served."""
        found: dict[str, ModelSource | None] = {}
        with suppress(KtError, OSError):  # which `kt alias` tells
            for alias in every_alias():
                model, adapter = split_adapter(alias.name)
                if adapter:
                    is_own = self._is_own_base(model)
                    found[alias.name.lower()] = self._with(adapter, served) if is_own else None
        return found

    def _with(self, adapter: str, served: Mapping[str, ModelSource]) -> ModelSource | None:
        """Returns the server's own model with an adapter; None: it is not served."""
        is_own = self.own.ready.adapter.lower() == adapter.lower()
        return self.own if is_own else served.get(adapter.lower())

    def _is_own_base(self, model: str) -> bool:
        """Returns whether a name means the server's own model, with an adapter or without."""
        return parse(model).model == parse(split_adapter(self.own.asked)[0]).model

    def _adapted(self) -> Iterator[ModelSource]:
        """Yields the server's own model with each adapter of the library that is for it, if it has room for any."""
        if self.own.how.wanted.adapters is None:
            return
        given = {name.lower() for name in self.adapters}
        try:
            found = adapters.every()
        except KtError as error:
            self.how.listener.warn(f"the adapters of the library cannot be read: {error}")
            return
        for entry in found:
            if not entry.problem and (entry.name.lower() in given or self._is_for_own(entry.base)):
                yield replace(self.own, adapter=entry.name)

    def _is_for_own(self, base: str) -> bool:
        """Returns whether the base that an adapter was imported for is the server's own model."""
        with suppress(KtError):  # it is no longer there
            return self._is_own_base(base)
        return False

    def _presets(self, names: Iterable[str]) -> dict[str, Preset]:
        """What aliases preset."""
        found = {}
        for name in names:
            with suppress(KtError, OSError):  # which `kt alias` tells
                found[name] = preset_of(name)
        return {name: preset for name, preset in found.items() if preset}

    def _source(self, entry: Entry, name: str) -> ModelSource:
        if self._is_own(entry):
            return self.own
        ready = Ready(name, entry.path)
        return ModelSource(ready, entry.library_label, self.how, self.keep_s, shorter=True)

    def _is_own(self, entry: Entry) -> bool:
        return Path(self.own.key) == entry.path

    def _preference(self, entry: Entry) -> tuple[bool, bool, bool]:
        """Returns a sort key: the first of a model's conversions gets its short name."""
        return not self._is_own(entry), not is_recommended(entry), entry.shared is not None
