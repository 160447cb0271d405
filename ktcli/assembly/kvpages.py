"""Connects an engine to the stores of KV pages, of the library and of several servers, so that a conversation's results
outlive the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from ktcli import config
from ktcli.assembly.listener import SILENT, Listener
from ktcli.engine import Engine
from ktcli.engine.pages import PageObserver
from ktcli.engine.prefix import salted
from ktcli.engine.tier import Tier
from ktcli.errors import KtError
from ktcli.hardware import measured
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.settings import MOONCAKE
from ktcli.store import engines, experience, places
from ktcli.store.mooncake.address import WHY, MooncakeAddress
from ktcli.store.mooncake.client import MooncakeStore, StoreConnection
from ktcli.store.mooncake.process import CLIENT, command_of
from ktcli.store.pagefile import Space
from ktcli.store.pagefolder import PageFolder, folder_name
from ktcli.store.pages import PageStore, RecordObserver
from ktcli.store.remote import OPEN_S, RemoteStore
from ktcli.store.sharedfolder import SharedFolder
from ktcli.threads import BackgroundCall

OFF = "off"  # of the setting kv-store


class PageWatch(PageObserver, RecordObserver, Protocol):
    """Is told which pages an engine can find, in memory and in the library."""

    def begins(self, root: bytes, medium: str) -> None:
        """Notes that a model was opened.

        Args:
            root: the key of its empty prefix, for those who name no salt and no adapter.
            medium: where its memory is: GPU or CPU.
        """

    def ends(self) -> None:
        """Notes that the model is closed."""


def cache_quota() -> int:
    """Returns the most bytes of KV pages that may be on disk; 0: none are kept.

    Raises:
        UsageError: KT_CACHE is no size.
    """
    return PageFolder.of_library().quota(config.cache_bytes())


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A folder in which several servers share KV pages, as somebody named it.

    Attributes:
        quota_bytes: the most bytes of the files that this library writes there; None: a share of the disk.
    """

    path: Path
    quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """A Mooncake store in which several servers share KV pages, as somebody named it.

    Attributes:
        text: its address, of which nothing was checked.
        is_insecure: whether the address may be one that is not of a private network.
    """

    text: str
    is_insecure: bool = False


def shared_place(
    text: str, quota_bytes: int | None = None, *, is_insecure: bool = False
) -> SharedStore | MooncakePlace | None:
    """Returns the store that an option or setting names; None: "off"."""
    if text == OFF:
        return None
    if text.startswith(MOONCAKE):
        return MooncakePlace(text, is_insecure)
    return SharedStore(Path(text).expanduser(), quota_bytes)


@contextmanager
def watched_pages(engine: Engine, watch: PageWatch | None) -> Iterator[None]:
    """Tells somebody which pages an engine has in memory while the context lasts; None: nobody."""
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
    """Keeps the pages of an engine in the library and in a shared store while the context lasts; what was computed is
    written at its end at the latest, as is how fast that was: the next process then knows at once whether reading
    pages pays.

    Args:
        pack: the folder of the conversion that runs.
        quota_bytes: the most bytes of all pages on disk; 0: none are read or written.
        shared: the folder, or another store, of several servers; None: there is none.
        watch: is told what the library has; None: nobody wants to know.
    Yields:
        The nearest store; None: there is none.
    """
    name = places.conversion_name(pack)
    own = _library_store(engine, quota_bytes, name, listener) if quota_bytes else None
    if own is not None:
        own.observe(watch)
    with ExitStack() as held:
        remote = None if shared is None else _shared_store(engine, shared, name, listener, held)
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
            experience.add_restored(folder_name(_space_of(engine)), tier.restored)


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
    return PageStore(folder, _space_of(engine), quota_bytes, _about(engine, model), listener.warn)


def _shared_store(
    engine: Engine,
    shared: SharedStore | MooncakePlace,
    model: str,
    listener: Listener,
    held: ExitStack,
) -> RemoteStore | MooncakeStore | None:
    """Opens the store that servers share; None: it cannot be used, which is said.

    Args:
        held: keeps what the store needs as long as it is used.
    """
    try:
        if isinstance(shared, MooncakePlace):
            return _mooncake_store(engine, shared, listener, held)
        return _store_in_folder(engine, shared, model, listener)
    except KtError as error:
        hint = f" ({error.hint})" if error.hint else ""
        listener.warn(f"{error}{hint}; kt goes on without it")
        return None


def _mooncake_store(
    engine: Engine, place: MooncakePlace, listener: Listener, held: ExitStack
) -> MooncakeStore:
    """Opens a Mooncake store. Raises: KtError: its client is not installed, or the address must not be used."""
    address = MooncakeAddress.parse(place.text)
    installed = engines.require(CLIENT)
    asking = BackgroundCall(address.resolved, "kt-resolve")  # a name service may hang
    if not asking.wait(OPEN_S):
        raise KtError(f"the address of the Mooncake store {address} is not found in time")
    if isinstance(asking.error, KtError):
        raise asking.error
    if not place.is_insecure:
        address.require_private(asking.result or ())
    held.enter_context(engines.in_use(installed))
    listener.note(f"KV pages are shared through {address}; {WHY}: keep others out with a firewall")
    memory, windows = engine.memory, engine.pools.windows
    window = windows.memory.page_bytes if windows is not None and windows.memory is not None else 0
    return MooncakeStore(
        StoreConnection(command_of(installed), address),
        _space_of(engine),
        max(memory.page_bytes, memory.state_bytes, window),
        listener.warn,
    )


def _store_in_folder(
    engine: Engine, shared: SharedStore, model: str, listener: Listener
) -> RemoteStore:
    """Opens the store in a shared folder. Raises: KtError: it cannot be used."""

    def open_store(warn: Callable[[str], object]) -> PageStore:
        folder = SharedFolder.open(shared.path)
        space, quota = _space_of(engine), folder.quota(shared.quota_bytes)
        if not folder.is_writable:
            quota = 0
            warn(f"the KV store {folder.path} cannot be written: kt reads it, and adds nothing")
        if folder.has_only_others(space, model):
            warn(
                f"the pages of {model} in the KV store {folder.path} are of another context, format or row of kernels:"
                " they are not used"
            )
        return PageStore(folder, space, quota, _about(engine, model), warn)

    return RemoteStore.open(shared.path, open_store, listener.warn)


def _cpu_of(engine: Engine) -> str:
    """The name of the CPU with the threads and the row of kernels that the engine has, and whether a GPU helps."""
    model, codec = read_cpu(SYSTEM_ROOT, ()).model, engine.memory.codec
    cpu = measured.key(model, engine.pool.threads, engine.pool.isa)
    return cpu if codec == "cpu" else f"{cpu} | {codec}"


@contextmanager
def store_below(
    engine: Engine, folder: PageFolder, quota_bytes: int, model: str, listener: Listener = SILENT
) -> Iterator[PageStore]:
    """Opens a store in a folder for the pages of an engine, and closes it when the context ends.

    Args:
        model: the model's name, for people.
    """
    about = _about(engine, model)
    store = PageStore(folder, _space_of(engine), quota_bytes, about, listener.warn)
    with _tier_over(engine, store, None):
        yield store


def _space_of(engine: Engine) -> Space:
    """The space of an engine's pages: everything that changes their bytes."""
    memory, pools = engine.memory, engine.pools
    windows = pools.windows
    facts: tuple[object, ...] = (pools.seed, memory.codec, memory.page_bytes, memory.state_bytes)
    if windows is not None and windows.memory is not None:
        facts = (*facts, windows.window, windows.memory.page_bytes)
    return Space(sha256(repr(facts).encode()).digest(), memory.codec)


def _about(engine: Engine, model: str) -> dict[str, Any]:
    memory = engine.memory
    return {"model": model, "page_bytes": memory.page_bytes, "state_bytes": memory.state_bytes}


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
