"""Runs a Mooncake store for those who have none: its master, and a client that lends it memory."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ktcli.assembly.child import kill, start_beside
from ktcli.errors import KtError, NotEnoughMemory, UsageError
from ktcli.hardware.memory import read_memory
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.records import dataclass
from ktcli.store import engines
from ktcli.store.engines import InstalledEngine
from ktcli.store.mooncake.address import WHY, MooncakeAddress
from ktcli.store.mooncake.process import CLIENT, Helper, HelperFailed, command_of

_BEGIN_S = 10.0  # in which the master has to answer
_LOOK_S = 0.5
_MASTER = "mooncake.cli"
_LEASE_MS = 10_000  # for which what was read is not given up


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The options of a store that kt runs.

    Attributes:
        address: that of the master.
        lends_bytes: the memory that this machine lends to the store.
        joins: whether the master runs already, here or elsewhere.
        is_insecure: whether the address may be one that is not of a private network.
    """

    address: MooncakeAddress
    lends_bytes: int
    joins: bool = False
    is_insecure: bool = False


def serve_store(settings: StoreSettings, ready: Callable[[], object]) -> None:
    """Runs a Mooncake store of KV pages until SIGINT or SIGTERM; to be called by the main thread.

    Args:
        ready: called once the store takes pages.
    Raises:
        NotFound: Mooncake is not installed. UsageError: the address must not be used, or is in use.
        NotEnoughMemory: less memory is free than it is to lend. KtError: a part of it has failed.
    """
    installed = engines.require(CLIENT)
    _require_address(settings)
    _require_memory(settings.lends_bytes)
    with ExitStack() as held:
        held.enter_context(engines.in_use(installed))
        told = held.enter_context(_told_to_end())
        parts: list[Callable[[], bool]] = []
        if not settings.joins:
            master = _started_master(installed, settings.address)
            held.callback(kill, master)
            _wait_for(settings.address, master)
            parts.append(lambda: master.poll() is not None)
        try:
            lender = Helper(command_of(installed), 0)
            lender.open(settings.address.master, _BEGIN_S, settings.lends_bytes)
        except HelperFailed as failure:
            raise KtError(
                f"the Mooncake store {settings.address} cannot be used: {failure}"
            ) from None
        held.callback(lender.reap)
        held.callback(lender.kill)
        parts.append(lambda: lender.has_ended)
        ready()
        while not told.wait(_LOOK_S):
            if any(has_ended() for has_ended in parts):
                raise KtError(f"the Mooncake store {settings.address} has ended by itself")


def _require_address(settings: StoreSettings) -> None:
    """Checks that an address may be used, and whether something listens there."""
    address = settings.address
    if not settings.is_insecure:
        try:
            address.require_private(address.resolved())
        except KtError as error:
            raise UsageError(str(error), hint=error.hint) from None
    if settings.joins:
        address.require_listener(_BEGIN_S)
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no name has such a part
        why = getattr(error, "strerror", None) or "there is no such host"
        raise UsageError(
            f"cannot listen on {address.master}: {why.partition(' (while')[0]}",
            hint="choose another --host or --port, or --join the store that runs there",
        ) from None


def _require_memory(size_bytes: int) -> None:
    have = read_memory(SYSTEM_ROOT).available_bytes
    if size_bytes > have:
        raise NotEnoughMemory("the store", size_bytes, have, hint="lend less with --memory")


def _started_master(
    installed: InstalledEngine, address: MooncakeAddress
) -> subprocess.Popen[bytes]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    words = {
        "rpc_address": address.host,
        "rpc_port": address.port,
        "metrics_host": "127.0.0.1",
        "metrics_port": metrics_port,
        "default_kv_lease_ttl": _LEASE_MS,
    }
    flags = [f"--{name}={value}" for name, value in words.items()]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {"GLOG_logtostderr": "1", "GLOG_minloglevel": "2"}
    try:
        return start_beside(installed.python, _MASTER, flags, environment=environment, **quiet)
    except OSError as error:
        raise KtError(f"cannot start {installed.label}: {error.strerror}") from error


def _wait_for(address: MooncakeAddress, master: subprocess.Popen[bytes]) -> None:
    """Waits for a master that was started. Raises: KtError: it does not come."""
    until = time.monotonic() + _BEGIN_S
    while True:
        try:
            address.require_listener(_LOOK_S)
            return
        except KtError:
            if master.poll() is not None or time.monotonic() > until:
                raise KtError(f"the Mooncake master does not start at {address.master}") from None
            time.sleep(_LOOK_S / 10)


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """An event that signals set, while the context lasts."""
    told = threading.Event()
    before = {
        each: signal.signal(each, lambda *_: told.set()) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_host(host: str, *, insecure: bool) -> None:
    """Checks that a Mooncake master may listen on the address `host`.

    Raises:
        UsageError: it would listen on all interfaces, and `insecure` is False.
    """
    if host in ("0.0.0.0", "::", "") and not insecure:
        raise UsageError(
            f"--host {host or 'without an address'} listens on all interfaces: {WHY}",
            hint="name an address of a private network, or --insecure if a firewall keeps others out",
        )
