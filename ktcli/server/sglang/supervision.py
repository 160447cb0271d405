"""Keeps an engine running, see `process.childsupervisor`, and says when it is ready.

Another thread than the main one asks the engine about its health, which may take half a minute. `kt ps` and `kt stop`
ask about it through its Unix socket.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ktcli.assembly.listener import Listener
from ktcli.errors import KtError, UsageError
from ktcli.records import dataclass
from ktcli.server.process.childsupervisor import POLL_S, ChildSupervisor, RestartPace
from ktcli.server.process.controlsocket import start_answering
from ktcli.server.process.discovery import LoadedStatus, Status
from ktcli.server.process.draintime import DRAIN_MOST_S
from ktcli.server.sglang.line import ServerLine
from ktcli.server.sglang.process import BoundedLog, EngineProcess
from ktcli.store.engines import InstalledEngine
from ktcli.threads import Daemon

HEALTH_S = 5.0  # between two questions
# Without any answer until it is ended: longer than the engine's own watchdog, which ends it after a step of 3,000 s.
HANG_S = 3600.0
START_S = 4 * 3600.0  # in which it is ready: 600 GB from a slow disk take two hours
_STEADY_S = 600.0  # that an engine has run when a crash does not count with earlier ones
BACKOFF_S, BACKOFF_MOST_S = 2.0, 60.0  # before it is started again; twice as long each time
_SPARE_S = 10.0  # beyond what answers were given to finish


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The options of a supervised engine.

    Attributes:
        name: the model, as requests name it.
        context: of a conversation, tokens.
        drain_s: the seconds that answers may take to finish when it is stopped.
        log: where what it prints is kept.
    """

    engine: InstalledEngine
    line: ServerLine
    name: str
    context: int
    address: str
    drain_s: float
    log: Path


class EngineSupervisor(ChildSupervisor[EngineProcess]):
    """An engine that runs until it is stopped; it is ready when it answers requests."""

    what = "engine"

    def __init__(
        self, settings: EngineSettings, listener: Listener, ready: Callable[[], None]
    ) -> None:
        pace = RestartPace(_STEADY_S, BACKOFF_S, BACKOFF_MOST_S)
        super().__init__(pace, settings.drain_s, listener, ready)
        self.settings, self._was_ready = settings, False
        self._answer, self._answered_s = 0, time.monotonic()

    @property
    def process(self) -> EngineProcess | None:
        """The engine process that runs; None: none does."""
        found = self._process
        return found if found is not None and found.ended() is None else None

    @property
    def is_ready(self) -> bool:
        """Whether the engine runs and last answered that it is healthy."""
        return self.process is not None and self._answer == 200

    def run(self) -> None:
        """Runs the engine, starting it again after a crash, until `stop` or a signal; see `ChildSupervisor.run`."""
        with closing(BoundedLog(self.settings.log)) as self._log:
            Daemon(self._watch, name="kt-engine-health").start()
            super().run()

    def _started(self) -> EngineProcess:
        self._answer, self._answered_s = 0, time.monotonic()
        return EngineProcess(self.settings.engine, self.settings.line, self._log)

    def _watch(self) -> None:
        """Asks the engine about its health until it is to be stopped: often while it loads, then now and then."""
        while not self._stops:
            if (process := self.process) is not None:
                found = process.answers()
                if process is self._process:
                    self._answer = found
                    if found:
                        self._answered_s = time.monotonic()
            time.sleep(HEALTH_S if self._answer == 200 else min(1.0, HEALTH_S))

    def _run_once(self, process: EngineProcess) -> KtError | None:
        error = self._watched(process)
        if error is None or self._stops:
            return None
        hints = error.hint, f"its log is {self.settings.log}"
        error.hint = "; ".join(each for each in hints if each)
        if not self._was_ready:
            raise error
        return error

    def _watched(self, process: EngineProcess) -> KtError | None:
        """Waits until the engine has ended, hangs, or is to be stopped; returns why it is no more, if so."""
        was_ready = False
        while not self._stops:
            if process.ended() is not None:
                return process.why()
            if not was_ready and self._answer == 200:
                was_ready = True
                self._tell_ready()
            waited_s = time.monotonic() - (self._answered_s if was_ready else process.began_s)
            if waited_s > (HANG_S if was_ready else START_S):
                process.kill()
                what = "did not answer" if was_ready else "was not ready"
                who = self.settings.engine.label
                return KtError(f"{who} {what} for {waited_s:.0f} s and was ended")
            time.sleep(POLL_S)
        return None

    def _tell_ready(self) -> None:
        if self.restarts:
            self._listener.note(f"{self.settings.name} answers again")
        else:
            self._ready()
        self._was_ready = True

    def _end_s(self) -> float:
        return self.drain_s + _SPARE_S


_RUNNING, _WAITING = "sglang:num_running_reqs", "sglang:num_queue_reqs"


def answer_at(listening: socket.socket, supervisor: EngineSupervisor) -> None:
    """Starts to answer requests at a socket that ask for an engine's status or change its drain time, until the socket
    is closed."""
    answers = {
        ("GET", "/server"): lambda _: engine_status(supervisor),
        ("POST", "/server/drain"): lambda body: _set_drain(supervisor, body),
    }
    start_answering(listening, answers)


def engine_status(supervisor: EngineSupervisor) -> Status:
    """Returns the report of an engine to `kt ps`: its model, requests, memory, and whether it is ready."""
    settings, process = supervisor.settings, supervisor.process
    counters = process.counters() if process is not None and supervisor.is_ready else None
    running, waiting = (
        int(counters.total(name) or 0) if counters else 0 for name in (_RUNNING, _WAITING)
    )
    memory = process.memory_bytes() if process is not None else 0
    loaded = LoadedStatus(
        settings.name, settings.context, memory, running, waiting, supervisor.since
    )
    return Status(
        settings.name,
        address=settings.address,
        context=settings.context if supervisor.is_ready else 0,
        running=running,
        waiting=waiting,
        since=supervisor.since,
        models=[loaded] if supervisor.is_ready else [],
        loading=not supervisor.is_ready,
        drain_s=int(supervisor.drain_s),
        engine=settings.engine.label,
    )


def _set_drain(supervisor: EngineSupervisor, body: Any) -> dict[str, float]:
    """Sets the time that answers may take to finish. Raises: UsageError: it is none."""
    seconds = body.get("seconds") if isinstance(body, dict) else None
    if not isinstance(seconds, int | float) or not 0 <= seconds <= DRAIN_MOST_S:
        raise UsageError(f"seconds must be a number from 0 to {DRAIN_MOST_S}")
    supervisor.drain_s = float(seconds)
    return {"drain_s": supervisor.drain_s}
