"""Keeps a router running, see `process.childsupervisor`; says when it is ready, and which servers it routes to.

What it routes to is kept here, so that servers that were added are there after a crash, too. Another thread than the
main one asks the servers, which may hang: those that did not answer yet, and all of them whether they are what they
were. That a server fails, or is used again, is said once, however often the router finds it so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace

from ktcli.assembly.listener import Listener
from ktcli.client.address import ServerAddress
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.records import dataclass
from ktcli.server.process.childsupervisor import POLL_S, ChildSupervisor, RestartPace
from ktcli.server.router.address import address_of, same_as
from ktcli.server.router.asking import context_of, facts_of
from ktcli.server.router.plan import (
    HEALTH_S,
    RouterKeys,
    RouterPlace,
    RoutingPlan,
    ServerFacts,
    arguments,
    require_agreement,
)
from ktcli.server.router.process import RouterProcess, stop_s
from ktcli.server.router.smg import SmgClient, Worker
from ktcli.store.engines import InstalledEngine
from ktcli.threads import Daemon

_DRAINING = "draining"


class HealthLog:
    """Compares a router's report on its servers with the report before."""

    def __init__(self) -> None:
        self._well: dict[str, bool] = {}

    def changes(self, workers: Sequence[Worker]) -> list[str]:
        """Returns a sentence for each server whose health has changed since the last call; a new healthy one is no
        change."""
        said = []
        for each in workers:
            if each.status == _DRAINING:  # it was removed
                continue
            before = self._well.get(each.url, True)
            if before and not each.is_healthy:
                said.append(f"{each.url} does not answer; its requests go to the other servers")
            elif each.is_healthy and not before:
                said.append(f"{each.url} answers again and is used")
            self._well[each.url] = each.is_healthy
        gone = self._well.keys() - {each.url for each in workers}
        for url in gone:
            del self._well[url]
        return said


READY_S = 60.0  # in which a router that starts can use a server
CHECK_S = 60.0  # after which a server is asked whether it is what it was
_STEADY_S = 60.0  # that a router has run when a crash does not count with earlier ones
_BACKOFF_S, _BACKOFF_MOST_S = 1.0, 30.0  # before it is started again; twice as long each time


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The options of a router: its servers, address and limits.

    Attributes:
        servers: those that answered.
        absent: those that did not yet; they are used once they do.
        model: the name that requests give.
    """

    engine: InstalledEngine
    plan: RoutingPlan
    place: RouterPlace
    keys: RouterKeys = field(repr=False)
    servers: tuple[ServerFacts, ...]
    absent: tuple[ServerAddress, ...] = ()
    model: str = ""


class RouterSupervisor(ChildSupervisor[RouterProcess]):
    """A router that runs until it is stopped, and the servers that it routes to."""

    what = "router"

    def __init__(
        self, settings: RouterSettings, listener: Listener, ready: Callable[[], None]
    ) -> None:
        pace = RestartPace(_STEADY_S, _BACKOFF_S, _BACKOFF_MOST_S)
        super().__init__(pace, settings.place.drain_s, listener, ready)
        self.settings = settings
        self.client = SmgClient(settings.place, settings.keys.control)
        self._servers = {each.url: each for each in settings.servers}
        self._absent = list(settings.absent)
        self._told: dict[str, str] = {}  # what was said last of servers that are not used
        self._health_changed = threading.Event()
        self._changing = threading.Lock()

    @property
    def servers(self) -> tuple[ServerFacts, ...]:
        """The facts of the servers that the router routes to."""
        return tuple(self._servers.values())

    @property
    def absent(self) -> tuple[str, ...]:
        """The addresses of the router's servers that have not answered yet, or are left out for now."""
        return tuple(each.url for each in self._absent)

    @property
    def pid(self) -> int:
        """The process id of the router program; 0: it was never started."""
        return self._process.pid if self._process else 0

    # --- servers come and go --------------------------------------------------------------------

    def add(self, address: ServerAddress) -> ServerFacts:
        """Adds a server that agrees with the others to the running router; returns its facts.

        Raises:
            KtError: the server does not answer, has another model or context than the others, or is there already.
        """
        self._require_new(address)
        found = facts_of(address, self.settings.keys.first, self.settings.model)
        with self._changing:  # and not before, since it may hang
            self._require_new(address)
            require_agreement([*self.servers, found])
            self.client.add(found.url, self.settings.keys.first)
            self._servers[found.url] = found
            if (absent := same_as(address, self._absent)) is not None:
                self._absent.remove(absent)
            return found

    def _require_new(self, address: ServerAddress) -> None:
        if (known := self._known(address)) is not None:
            raise UsageError(
                f"the router has {known} already", hint="kt route status lists its servers"
            )

    def remove(self, address: ServerAddress) -> None:
        """Removes a server from the running router; its answers in progress may finish.

        Raises:
            NotFound: the router has no such server. UsageError: it has no other one. KtError: see `SmgClient.remove`.
        """
        with self._changing:
            if (absent := same_as(address, self._absent)) is not None:
                self._absent.remove(absent)
                return
            if (url := self._known(address)) is None:
                raise NotFound(
                    f"the router does not route to {address.url}",
                    hint=f"it routes to {', '.join(self._servers)}",
                )
            if len(self._servers) == 1:
                raise UsageError(
                    f"{url} is the router's only server", hint="kt stop stops the router"
                )
            del self._servers[url]
            self.client.remove(url)

    def _known(self, address: ServerAddress) -> str | None:
        """The server that an address means, among those that are used; None: none."""
        found = same_as(address, [address_of(each) for each in self._servers])
        return None if found is None else found.url

    def _watch(self) -> None:
        """Asks servers until the router is to be stopped."""
        checked_s = time.monotonic()
        while not self._stops:
            time.sleep(HEALTH_S)
            self._ask_again()
            if self._health_changed.is_set() or time.monotonic() - checked_s > CHECK_S:
                self._health_changed.clear()
                self._check()
                checked_s = time.monotonic()

    def _ask_again(self) -> None:
        """Adds the servers that answer by now; of those that disagree, that is said."""
        for address in list(self._absent):
            try:
                self.add(address)
            except UsageError as error:
                self._tell_once(address, f"{error}; {address.url} is not used")
            except KtError:
                continue
            else:
                self._listener.note(f"{address.url} answers now and is used")

    def _check(self) -> None:
        """Leaves out servers that are not what they were, such as those that were started again with another model;
        they are asked again as those that do not answer."""
        for server in self.servers:
            address = address_of(server.url)
            try:
                context = context_of(address, self.settings.keys.first, self.settings.model)
                require_agreement([server, replace(server, context=context)])
            except UsageError as error:
                self._leave_out(address, error)
            except KtError:
                continue

    def _leave_out(self, address: ServerAddress, why: KtError) -> None:
        try:
            self.remove(address)
        except KtError as error:
            if self._known(address):  # it is the last
                self._tell_once(address, f"{why}; {error}")
                return
        self._tell_once(address, f"{why}; it is not used any more")
        self._absent.append(address)

    def _tell_once(self, address: ServerAddress, sentence: str) -> None:
        if self._told.get(address.url) != sentence:
            self._told[address.url] = sentence
            self._listener.warn(sentence)

    # --- the process ----------------------------------------------------------------------------

    def _run_once(self, process: RouterProcess) -> KtError | None:
        is_ready = self._is_ready(process)
        if not (self._stops or self.restarts or is_ready):
            raise self._not_ready(process)
        if is_ready and not self._stops:
            self._run_ready(process)
        if self._stops:
            return None
        if process.ended() is None:
            process.kill()
        return KtError(f"{self.settings.engine.label} ended by itself: {process.why()}")

    def _run_ready(self, process: RouterProcess) -> None:
        """Passes on what becomes of the servers, until the router has ended or is to be stopped."""
        if not self.restarts:
            self._ready()
            Daemon(self._watch, name="kt-route-servers").start()
        health = HealthLog()
        while process.ended() is None and not self._stops_in(HEALTH_S):
            with contextlib.suppress(KtError):  # it has ended, or is busy: the next look says more
                for each in health.changes(self.client.workers()):
                    self._listener.warn(each)
                    self._health_changed.set()

    def _started(self) -> RouterProcess:
        settings = self.settings
        words = arguments([*self._servers], settings.plan, settings.place, settings.keys)
        return RouterProcess(settings.engine, words, self._listener)

    def _is_ready(self, process: RouterProcess) -> bool:
        """Waits until it can use all its servers, or any of them after a while; returns whether it can."""
        until = time.monotonic() + READY_S
        while process.ended() is None and not self._stops_in(POLL_S):
            found = self.client.readiness()
            healthy = found.healthy_workers if found else 0
            if healthy >= len(self._servers):
                return True
            if time.monotonic() > until:
                return healthy > 0
        return False

    def _not_ready(self, process: RouterProcess) -> KtError:
        if process.ended() is None:
            process.kill()
            return KtError(
                f"the router could use none of its servers within {READY_S:.0f} s",
                hint="check that they answer: curl ADDRESS/health",
            )
        return KtError(f"{self.settings.engine.label} ended at its start: {process.why()}")

    def _end_s(self) -> float:
        return stop_s(self.drain_s)
