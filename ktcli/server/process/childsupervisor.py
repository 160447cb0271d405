"""Keeps a child process running: starts it, starts it again after a crash, ends it when told.

A signal only counts; the main thread looks at the count, ten times a second. What the child is, and when it is ready,
is the business of `server/router` and `server/sglang`.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from ktcli.assembly.child import LoggedChild
from ktcli.assembly.listener import Listener
from ktcli.errors import KtError, counted
from ktcli.records import dataclass
from ktcli.server.process.endsignals import ENDING, signals_handled

POLL_S = 0.1
_CRASHES_MOST = 5  # one after the other, until it is given up

Child = TypeVar("Child", bound=LoggedChild)


@dataclass(frozen=True, slots=True)
class RestartPace:
    """The times of restarts after crashes, in seconds.

    Attributes:
        steady_s: that a child has run when a crash does not count with earlier ones.
        backoff_s, most_s: before it is started again: the first time, and at most; twice as long each time.
    """

    steady_s: float
    backoff_s: float
    most_s: float


class ChildSupervisor(ABC, Generic[Child]):
    """A child that runs until it is stopped.

    Args:
        ready: called when it can be used, the first time only.
    Attributes:
        since: when it was started, seconds since 1970.
        restarts: how often it was started again after a crash.
        drain_s: the seconds that answers may take to finish when it is stopped.
    """

    what: str  # for sentences about it

    def __init__(
        self, pace: RestartPace, drain_s: float, listener: Listener, ready: Callable[[], None]
    ) -> None:
        self.since, self.restarts, self.drain_s = int(time.time()), 0, drain_s
        self._pace, self._listener, self._ready = pace, listener, ready
        self._stops = 0
        self._process: Child | None = None

    def stop(self) -> None:
        """Has the child process end once answers have finished; the second call ends it at once."""
        self._stops += 1

    def run(self) -> None:
        """Runs the child process, starting it again after a crash, until `stop` or a signal; to be called on the main
        thread.

        Raises:
            KtError: it does not start, or crashes again and again; the error says why.
        """
        crashes = 0
        # Signals that the parent process ignored stay ignored.
        told = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
        with signals_handled(lambda number: self.stop(), told):
            try:
                while not self._stops:
                    process = self._process = self._started()
                    error = self._run_once(process)
                    if self._stops:
                        self._end(process)
                    elif error is not None:
                        steady = time.monotonic() - process.began_s > self._pace.steady_s
                        crashes = 1 if steady else crashes + 1
                        self._after_crash(error, crashes)
            finally:
                self.stop()  # for threads that watch it
                if self._process is not None:
                    self._process.kill()

    @abstractmethod
    def _started(self) -> Child:
        """Starts a child and returns it."""

    @abstractmethod
    def _run_once(self, process: Child) -> KtError | None:
        """Waits until the child has ended, hangs, or is to be stopped; returns why it is no more, if so.

        Raises:
            KtError: it was never ready, so that it is not to be started again.
        """

    @abstractmethod
    def _end_s(self) -> float:
        """Returns the seconds after which a child that was asked to end is killed."""

    def _after_crash(self, error: KtError, crashes: int) -> None:
        """Waits before the child is started again.

        Raises:
            KtError: it crashes again and again.
        """
        if crashes >= _CRASHES_MOST:
            error.args = (f"{error}; that was the {crashes}th time in a row",)
            raise error
        wait_s = min(self._pace.backoff_s * 2.0 ** (crashes - 1), self._pace.most_s)
        self._listener.warn(f"{error}; it is started again in {wait_s:.0f} s")
        self.restarts += 1
        self._stops_in(wait_s)

    def _end(self, process: Child) -> None:
        """Ends the child, by force if it takes too long or a second stop comes."""
        before = self._stops
        process.stop()
        if process.ended() is None:
            answers = f"answers have up to {counted(int(self.drain_s), 'second')} to finish"
            self._listener.note(f"{answers}; Ctrl-C again ends at once")
        until = time.monotonic() + self._end_s()
        while process.ended() is None and self._stops <= before:
            if time.monotonic() > until:
                self._listener.warn(f"the {self.what} did not end by itself; it was killed")
                break
            time.sleep(POLL_S)
        process.kill()

    def _stops_in(self, seconds: float) -> bool:
        """Waits, no longer than a running child runs; returns whether it is to be stopped."""
        until, process = time.monotonic() + seconds, self._process
        was_running = process is not None and process.ended() is None
        while not self._stops and (left := until - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
            if was_running and process is not None and process.ended() is not None:
                break
        return self._stops > 0
