"""Keeps an engine running: starts it, says when it is ready, starts it again after a crash, ends it when told.

A signal only counts; the main thread looks at the count, ten times a second. Another thread asks the engine about its
health, which may take half a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ktcli.assembly.listener import Listener
from ktcli.errors import KtError, counted
from ktcli.server.process.endsignals import on_end_signals
from ktcli.server.sglang.boundedlog import BoundedLog
from ktcli.server.sglang.line import ServerLine
from ktcli.server.sglang.process import EngineProcess
from ktcli.store.engines import InstalledEngine
from ktcli.threads import Daemon

_POLL_S = 0.1
HEALTH_S = 5.0  # between two questions
# Without any answer until it is ended: longer than the engine's own watchdog, which ends it after a step of 3,000 s.
HANG_S = 3600.0
START_S = 4 * 3600.0  # in which it is ready: 600 GB from a slow disk take two hours
_STEADY_S = 600.0  # that an engine has run when a crash does not count with earlier ones
BACKOFF_S, BACKOFF_MOST_S = 2.0, 60.0  # before it is started again; twice as long each time
CRASHES_MOST = 5  # one after the other, until it is given up
_SPARE_S = 10.0  # beyond what answers were given to finish


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What is run, and how.

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


class EngineSupervisor:
    """An engine that runs until it is told to stop.

    Args:
        ready: called when it answers requests, the first time only.
    Attributes:
        since: when it was started, seconds since 1970.
        restarts: how often it was started again after a crash.
    """

    def __init__(
        self, settings: EngineSettings, listener: Listener, ready: Callable[[], None]
    ) -> None:
        self.settings, self.since, self.restarts = settings, int(time.time()), 0
        self.drain_s = settings.drain_s
        self._listener, self._ready = listener, ready
        self._stops, self._was_ready = 0, False
        self._process: EngineProcess | None = None
        self._answer, self._answered_s = 0, time.monotonic()

    @property
    def process(self) -> EngineProcess | None:
        """The process that runs; None: none does."""
        found = self._process
        return found if found is not None and found.ended() is None else None

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests."""
        return self.process is not None and self._answer == 200

    def stop(self) -> None:
        """Lets answers finish and ends; the second call ends them at once."""
        self._stops += 1

    def run(self) -> None:
        """Runs the engine until `stop`, or a signal; on the main thread.

        Raises:
            KtError: it does not start, or crashes again and again; the sentence says why.
        """
        log, crashes = BoundedLog(self.settings.log), 0
        with on_end_signals(self.stop):
            try:
                Daemon(self._watch, name="kt-engine-health").start()
                while not self._stops:
                    self._begin(log)
                    assert self._process is not None
                    error = self._run_once(self._process)
                    if self._stops:
                        self._end(self._process)
                    elif error is not None:
                        steady = time.monotonic() - self._process.began_s > _STEADY_S
                        crashes = 1 if steady else crashes + 1
                        self._after_crash(error, crashes)
            finally:
                self.stop()  # for the thread that asks
                if self._process is not None:
                    self._process.kill()
                log.close()

    def _begin(self, log: BoundedLog) -> None:
        self._answer, self._answered_s = 0, time.monotonic()
        self._process = EngineProcess(self.settings.engine, self.settings.line, log)

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
                return KtError(
                    f"{self.settings.engine.label} {what} for {waited_s:.0f} s and was ended",
                    hint=f"its log is {self.settings.log}",
                )
            time.sleep(_POLL_S)
        return None

    def _tell_ready(self) -> None:
        if self.restarts:
            self._listener.note(f"{self.settings.name} answers again")
        else:
            self._ready()
        self._was_ready = True

    def _after_crash(self, error: KtError, crashes: int) -> None:
        """Waits before the engine is started again.

        Raises:
            KtError: it was never ready, or crashes again and again.
        """
        error.hint = "; ".join(
            each for each in (error.hint, f"its log is {self.settings.log}") if each
        )
        if not self._was_ready:
            raise error
        if crashes >= CRASHES_MOST:
            error.args = (f"{error}; that was the {crashes}th time in a row",)
            raise error
        wait_s = min(BACKOFF_S * 2.0 ** (crashes - 1), BACKOFF_MOST_S)
        self._listener.warn(f"{error}; it is started again in {wait_s:.0f} s")
        self.restarts += 1
        until = time.monotonic() + wait_s
        while not self._stops and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _end(self, process: EngineProcess) -> None:
        """Ends the engine, by force if it takes too long or a second stop comes."""
        before = self._stops
        process.stop()
        if process.ended() is None:
            answers = f"answers have up to {counted(int(self.drain_s), 'second')} to finish"
            self._listener.note(f"{answers}; Ctrl-C again ends at once")
        until = time.monotonic() + self.drain_s + _SPARE_S
        while process.ended() is None:
            if self._stops > before or time.monotonic() > until:
                if self._stops <= before:
                    self._listener.warn("the engine did not end by itself; it was killed")
                break
            time.sleep(_POLL_S)
        process.kill()
