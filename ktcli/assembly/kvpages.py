"""Connects an engine to the library's store of KV pages, so that a conversation's results outlive the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ktcli import config
from ktcli.assembly.listener import SILENT, Listener
from ktcli.engine import Engine
from ktcli.engine.tier import Tier
from ktcli.errors import KtError
from ktcli.hardware import measured
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.store import experience, places
from ktcli.store.pagefile import Space
from ktcli.store.pagefolder import PageFolder
from ktcli.store.pages import PageStore


def cache_quota() -> int:
    """Returns the most bytes of KV pages that may be on disk; 0: none are kept.

    Raises:
        UsageError: KT_CACHE is no size.
    """
    return PageFolder.of_library().quota(config.cache_bytes())


@contextmanager
def stored_pages(
    engine: Engine, pack: Path, quota_bytes: int, listener: Listener = SILENT
) -> Iterator[PageStore | None]:
    """Keeps the pages of an engine in the library while the context lasts; what was computed is written at its end
    at the latest, as is how fast that was: the next process then knows at once whether reading pages pays.

    Args:
        pack: the folder of the conversion that runs.
        quota_bytes: the most bytes of all pages on disk; 0: none are read or written.
    Yields:
        The store; None: there is none.
    """
    folder = PageFolder.of_library()
    if not quota_bytes:
        yield None
        return
    try:
        folder.check()
    except KtError as error:
        listener.warn(f"{error}; {error.hint}")
        yield None
        return
    name, cpu = places.conversion_name(pack), _cpu_of(engine)
    with store_below(engine, folder, quota_bytes, name, listener) as store:
        tier = engine.pools.tier
        assert tier is not None
        tier.prompt_tok_s = experience.recall_prompt_rate(name, cpu)
        try:
            yield store
        finally:
            if tier.prompt_tok_s is not None:
                experience.note_prompt_rate(name, cpu, tier.prompt_tok_s)


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
    memory, pools = engine.memory, engine.pools
    windows = pools.windows
    facts: tuple[object, ...] = (pools.seed, memory.codec, memory.page_bytes, memory.state_bytes)
    if windows is not None and windows.memory is not None:
        facts = (*facts, windows.window, windows.memory.page_bytes)
    space = Space(sha256(repr(facts).encode()).digest(), memory.codec)
    about = {"model": model, "page_bytes": memory.page_bytes, "state_bytes": memory.state_bytes}
    store = PageStore(folder, space, quota_bytes, about, listener.warn)
    tier = Tier(store, memory, pools.pages, pools.states, windows)
    store.writer.busy = lambda: tier.is_busy
    pools.tier = tier
    try:
        yield store
    finally:
        tier.turn_over()
        store.close()
        tier.detach()
        pools.tier = None
