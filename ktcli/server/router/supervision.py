"""Keeps a router running: starts it, says when it is ready, starts it again after a crash, ends it when told.

What it routes to is kept here, so that servers that were added are there after a crash, too. A signal only counts; the
main thread looks at the count, ten times a second. Another thread asks the servers, which may hang: those that did not
answer yet, and all of them whether they are what they were.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ktcli.assembly.listener import Listener
from ktcli.client.address import ServerAddress
from ktcli.errors import KtError, NotFound, UsageError, counted
from ktcli.server.process.endsignals import on_end_signals
from ktcli.server.router.address import address_of, same_as
from ktcli.server.router.asking import context_of, facts_of
from ktcli.server.router.facts import ServerFacts, require_agreement
from ktcli.server.router.health import HealthLog
from ktcli.server.router.plan import HEALTH_S, RouterKeys, RouterPlace, RoutingPlan, arguments
from ktcli.server.router.process import RouterProcess, stop_s
from ktcli.server.router.smg import SmgClient
from ktcli.store.engines import InstalledEngine
from ktcli.threads import Daemon

READY_S = 60.0  # in which a router that starts can use a server
CHECK_S = 60.0  # after which a server is asked whether it is what it was
_POLL_S = 0.1
_STEADY_S = 60.0  # that a router has run when a crash does not count with earlier ones
_BACKOFF_S, _BACKOFF_MOST_S = 1.0, 30.0  # before it is started again; twice as long each time
_CRASHES_MOST = 5  # one after the other, until it is given up


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What is routed, and how.

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


class RouterSupervisor:
    """A router that runs until it is told to stop.

    Args:
        ready: called when it can be used, the first time only.
    Attributes:
        since: when it was started, seconds since 1970.
        restarts: how often it was started again after a crash.
    """

    def __init__(
        self, settings: RouterSettings, listener: Listener, ready: Callable[[], None]
    ) -> None:
        self.settings, self.since, self.restarts = settings, int(time.time()), 0
        self.client = SmgClient(settings.place, settings.keys.control)
        self._listener, self._ready = listener, ready
        self._servers = {each.url: each for each in settings.servers}
        self._absent = list(settings.absent)
        self._told: dict[str, str] = {}  # what was said last of servers that are not used
        self._health_changed = threading.Event()
        self._stops = 0
        self._changing = threading.Lock()
        self._process: RouterProcess | None = None

    @property
    def servers(self) -> tuple[ServerFacts, ...]:
        """The servers that it routes to."""
        return tuple(self._servers.values())

    @property
    def absent(self) -> tuple[str, ...]:
        """The addresses of servers that have not answered yet."""
        return tuple(each.url for each in self._absent)

    @property
    def pid(self) -> int:
        """The process of the router; 0: none runs."""
        return self._process.pid if self._process else 0

    def stop(self) -> None:
        """Lets answers finish and ends; the second call ends them at once."""
        self._stops += 1

    def run(self) -> None:
        """Routes until `stop`, or a signal; on the main thread.

        Raises:
            KtError: it does not start, or crashes again and again.
        """
        crashes = 0
        with on_end_signals(self.stop):
            try:
                while not self._stops:
                    process = self._process = self._started()
                    self._run_once(process)
                    if self._stops:
                        self._end(process)
                    else:
                        steady = time.monotonic() - process.began_s > _STEADY_S
                        crashes = 1 if steady else crashes + 1
                        self._after_crash(process, crashes)
            finally:
                self.stop()  # for the thread that asks servers
                if self._process is not None and self._process.ended() is None:
                    self._process.kill()

    # --- servers come and go --------------------------------------------------------------------

    def add(self, address: ServerAddress) -> ServerFacts:
        """Adds a server that agrees with the others, and returns its facts.

        Raises:
            KtError: it does not answer, disagrees, or is there already.
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
        """Takes a server out, whose answers may finish.

        Raises:
            NotFound: it is not one of them. UsageError: it is the last.
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

    def _run_once(self, process: RouterProcess) -> None:
        """Waits until the router is ready, and then until it has ended or is to be stopped.

        Raises:
            KtError: it does not become ready the first time.
        """
        is_ready = self._is_ready(process)
        if self._stops or (self.restarts and not is_ready):
            return
        if not is_ready:
            raise self._not_ready(process)
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
        while process.ended() is None and not self._stops_in(_POLL_S):
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

    def _after_crash(self, process: RouterProcess, crashes: int) -> None:
        """Waits before the router is started again.

        Raises:
            KtError: it crashes again and again.
        """
        if process.ended() is None:
            process.kill()
        said = f"{self.settings.engine.label} ended by itself: {process.why()}"
        if crashes >= _CRASHES_MOST:
            raise KtError(f"{said}; that was the {crashes}th time in a row")
        wait_s = min(_BACKOFF_S * 2.0 ** (crashes - 1), _BACKOFF_MOST_S)
        self._listener.warn(f"{said}; it is started again in {wait_s:.0f} s")
        self.restarts += 1
        self._stops_in(wait_s)

    def _end(self, process: RouterProcess) -> None:
        """Ends the router, by force if it takes too long or a second stop comes."""
        drain_s, before = self.settings.place.drain_s, self._stops
        process.stop()
        if process.ended() is None:
            answers = f"answers have up to {counted(drain_s, 'second')} to finish"
            self._listener.note(f"{answers}; Ctrl-C again ends at once")
        until = time.monotonic() + stop_s(drain_s)
        while not process.wait(_POLL_S):
            if self._stops > before:
                process.kill()
            elif time.monotonic() > until:
                self._listener.warn("the router did not end by itself; it was killed")
                process.kill()

    def _stops_in(self, seconds: float) -> bool:
        """Waits, no longer than the router runs; returns whether it is to be stopped."""
        until, process = time.monotonic() + seconds, self._process
        was_running = process is not None and process.ended() is None
        while not self._stops and (left := until - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left))
            if was_running and process is not None and process.ended() is not None:
                break
        return self._stops > 0
