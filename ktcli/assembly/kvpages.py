"""Connects an engine to the stores of KV pages, of the library and of several servers, so that a conversation's results
outlive the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ktcli import config
from ktcli.assembly.kvplaces import MooncakePlace, SharedStore, about_of, space_of
from ktcli.assembly.listener import SILENT, Listener
from ktcli.engine import Engine
from ktcli.engine.pages import PageObserver
from ktcli.engine.prefix import salted
from ktcli.engine.tier import Tier
from ktcli.errors import KtError
from ktcli.hardware import measured
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.store import experience, places
from ktcli.store.pagefolder import PageFolder, folder_name
from ktcli.store.pages import PageStore, RecordObserver
from ktcli.store.remote import RemoteStore

if TYPE_CHECKING:
    from ktcli.store.mooncake.client import MooncakeStore


class PageWatch(PageObserver, RecordObserver, Protocol):
    """The interface of a listener for the KV pages that an engine can find, in memory and in the library."""

    def begins(self, root: bytes, medium: str) -> None:
        """Called when a model was opened, before pages are reported.

        Args:
            root: the key of the empty prefix, from which the keys of pages follow, for requests without salt and
                without an adapter other than the one that the model was opened with.
            medium: where its KV pages are: "GPU" or "CPU".
        """

    def ends(self) -> None:
        """Called when the model is closed, after the last page was reported."""


def cache_quota() -> int:
    """Returns the most bytes of KV pages that may be stored in the library on disk; 0: none are stored.

    Raises:
        UsageError: KT_CACHE is not a valid size.
    """
    return PageFolder.of_library().quota(config.cache_bytes())


@contextmanager
def watched_pages(engine: Engine, watch: PageWatch | None) -> Iterator[None]:
    """Opens a context, without a value, in which the KV pages that an engine has in memory are reported to `watch`; if
    that is None, nothing is reported.
    """
    if watch is None:
        yield
        return
    pools = engine.pools
    root = salted(pools.seed, "", pools.adapter.digest if pools.adapter else "")
    watch.begins(root, "CPU" if engine.memory.codec == "cpu" else "GPU")
    pools.pages.observer = watch
    try:
        yield
    finally:
        pools.pages.observer = None
        watch.ends()


@contextmanager
def stored_pages(
    engine: Engine,
    pack: Path,
    quota_bytes: int,
    listener: Listener = SILENT,
    shared: SharedStore | MooncakePlace | None = None,
    watch: RecordObserver | None = None,
) -> Iterator[PageStore | MooncakeStore | None]:
    """Opens a context in which an engine's KV pages are stored in the library and in a shared store. At its end all
    pages are written, and the speed at which prompts were read is recorded.

    Args:
        pack: the folder of the conversion that runs.
        quota_bytes: the most bytes of all pages on disk; 0: none are read or written.
        shared: the folder, or other store, that several servers share; None: there is none.
        watch: is told which pages the library's store has and removes; None: nobody is told.
    Yields:
        The library's store, or the shared one if the library keeps none; None: there is neither.
    """
    name = places.conversion_name(pack)
    own = _library_store(engine, quota_bytes, name, listener) if quota_bytes else None
    if own is not None:
        own.observe(watch)
    with ExitStack() as held:
        remote: RemoteStore | MooncakeStore | None = None
        if shared is not None:
            from ktcli.assembly.kvshared import shared_store

            remote = shared_store(engine, shared, name, listener, held)
        nearest = own or (remote.inner if isinstance(remote, RemoteStore) else remote)
        if nearest is None:
            yield None
            return
        cpu = _cpu_of(engine)
        tier = held.enter_context(_tier_over(engine, own, remote))
        tier.prompt_tok_s = experience.recall_prompt_rate(name, cpu)
        try:
            yield nearest
        finally:
            if tier.prompt_tok_s is not None:
                experience.note_prompt_rate(name, cpu, tier.prompt_tok_s)
            experience.add_restored(folder_name(space_of(engine)), tier.restored)


def _library_store(
    engine: Engine, quota_bytes: int, model: str, listener: Listener
) -> PageStore | None:
    """Opens the store of the library; None: this version may not use it, which is said."""
    folder = PageFolder.of_library()
    try:
        folder.check()
    except KtError as error:
        listener.warn(f"{error}; {error.hint}")
        return None
    return PageStore(folder, space_of(engine), quota_bytes, about_of(engine, model), listener.warn)


def _cpu_of(engine: Engine) -> str:
    """The name of the CPU with the threads and the row of kernels that the engine has, and whether a GPU helps."""
    model, codec = read_cpu(SYSTEM_ROOT, ()).model, engine.memory.codec
    cpu = measured.key(model, engine.pool.threads, engine.pool.isa)
    return cpu if codec == "cpu" else f"{cpu} | {codec}"


@contextmanager
def store_below(
    engine: Engine, folder: PageFolder, quota_bytes: int, model: str, listener: Listener = SILENT
) -> Iterator[PageStore]:
    """Opens a context that gives a store of an engine's KV pages in a folder; its end closes the store.

    Args:
        model: the model's name, for people.
    """
    about = about_of(engine, model)
    store = PageStore(folder, space_of(engine), quota_bytes, about, listener.warn)
    with _tier_over(engine, store, None):
        yield store


@contextmanager
def _tier_over(
    engine: Engine, own: PageStore | None, remote: RemoteStore | MooncakeStore | None
) -> Iterator[Tier]:
    """Lets an engine's pages go to stores while the context lasts, and closes them at its end."""
    pools = engine.pools
    stores: list[PageStore | RemoteStore | MooncakeStore]
    stores = [store for store in (own, remote) if store is not None]
    tier = Tier(stores, engine.memory, pools.pages, pools.states, pools.windows)
    for store in stores:
        store.writer.busy = lambda: tier.is_busy
    pools.tier = tier
    try:
        yield tier
    finally:
        tier.turn_over()
        for store in stores:
            store.hurry()  # at the same time
        for store in stores:
            store.close()
        tier.detach()
        pools.tier = None
