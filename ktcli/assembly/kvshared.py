"""Opens the stores of KV pages that several servers share: a folder, or Mooncake's; imported for those who name one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ktcli.assembly.kvplaces import MooncakePlace, SharedStore, about_of, space_of
from ktcli.assembly.listener import Listener
from ktcli.engine import Engine
from ktcli.errors import KtError
from ktcli.store import engines
from ktcli.store.mooncake.address import WHY, MooncakeAddress
from ktcli.store.mooncake.client import MooncakeStore, StoreConnection
from ktcli.store.mooncake.process import CLIENT, command_of
from ktcli.store.pages import PageStore
from ktcli.store.remote import OPEN_S, RemoteStore
from ktcli.store.sharedfolder import SharedFolder
from ktcli.threads import BackgroundCall


def shared_store(
    engine: Engine,
    shared: SharedStore | MooncakePlace,
    model: str,
    listener: Listener,
    held: ExitStack,
) -> RemoteStore | MooncakeStore | None:
    """Opens and returns the store of KV pages that several servers share; None if it cannot be used, after a warning
    that says why.

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
        space_of(engine),
        max(memory.page_bytes, memory.state_bytes, window),
        listener.warn,
    )


def _store_in_folder(
    engine: Engine, shared: SharedStore, model: str, listener: Listener
) -> RemoteStore:
    """Opens the store in a shared folder. Raises: KtError: it cannot be used."""

    def open_store(warn: Callable[[str], object]) -> PageStore:
        folder = SharedFolder.open(shared.path)
        space, quota = space_of(engine), folder.quota(shared.quota_bytes)
        if not folder.is_writable:
            quota = 0
            warn(f"the KV store {folder.path} cannot be written: kt reads it, and adds nothing")
        if folder.has_only_others(space, model):
            warn(
                f"the pages of {model} in the KV store {folder.path} are of another context, format or row of kernels:"
                " they are not used"
            )
        return PageStore(folder, space, quota, about_of(engine, model), warn)

    return RemoteStore.open(shared.path, open_store, listener.warn)
