"""Starts the threads of kt with all signals blocked, so that the main thread handles every signal.

The interpreter runs handlers on its main thread only, whichever thread the system gives a signal to. A stopped process
that is continued may give it to any thread that lets it through; the main thread would wait on, and the signal be lost.
Threads inherit what their maker blocks, so whatever a library starts from these threads takes none either.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

A = TypeVar("A")
T = TypeVar("T")

# Faults belong to the thread that makes them. The native library does the same: see native/src/thread.c.
_FAULTS = {signal.SIGILL, signal.SIGFPE, signal.SIGSEGV, signal.SIGBUS}
# Real-time signals have no handlers here, and Python takes ten times as long to name those that it gives back.
_BLOCKED = {each for each in signal.valid_signals() if each < signal.SIGRTMIN} - _FAULTS


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Opens a context in which the calling thread, and threads that it starts, receive only real-time signals and those
    of faults (SIGSEGV …). Other signals are delivered when the context ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Daemon(threading.Thread):
    """A daemon thread that receives no signals."""

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread, with signals blocked in it."""
        with signals_blocked():
            super().start()


class BackgroundCall(Generic[T]):
    """A call on a daemon thread, which need not be waited for.

    Attributes:
        result: what the call returned; None: it has not, or raised.
        error: what it raised.
        began_s: when it was made, `time.monotonic`.
        took_s: the seconds to its end, once it has ended.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call, self._ended = call, threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None
        self.began_s, self.took_s = time.monotonic(), 0.0
        Daemon(self._run, name=name).start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error
        finally:
            del self._call  # what it holds may be large
            self.took_s = time.monotonic() - self.began_s
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether the function called in the background has returned or raised."""
        return self._ended.is_set()

    def wait(self, wait_s: float) -> bool:
        """Waits until the function called in the background has ended; returns whether it has
        within `wait_s` seconds.
        """
        return self._ended.wait(wait_s)


def in_parallel(call: Callable[[A], T], items: Sequence[A], threads: int, name: str) -> list[T]:
    """Returns the results of `call` for the items, in their order; up to `threads` daemon threads call it, so that a
    blocked one does not keep the process from ending. If calls raise, one of their errors is raised once all threads
    have ended; with a single item or thread, `call` runs in this thread and its first error is raised at once.
    """
    if min(threads, len(items)) < 2:
        return [call(item) for item in items]
    results: dict[int, T] = {}
    left = iter(range(len(items)))

    def work() -> None:
        for at in left:
            results[at] = call(items[at])

    jobs = [BackgroundCall(work, name) for _ in range(min(threads, len(items)))]
    try:
        for job in jobs:
            job.wait(threading.TIMEOUT_MAX)
    except BaseException:  # Ctrl-C: what the calls use is given back afterwards
        for _ in left:
            pass
        for job in jobs:
            job.wait(threading.TIMEOUT_MAX)
        raise
    if error := next((job.error for job in jobs if job.error is not None), None):
        raise error
    return [results[at] for at in range(len(items))]
