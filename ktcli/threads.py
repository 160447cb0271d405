"""Starts the threads of kt with all signals blocked, so that the main thread handles every signal.

The interpreter runs handlers on its main thread only, whichever thread the system gives a signal to. A stopped process
that is continued may give it to any thread that lets it through; the main thread would wait on, and the signal be lost.
Threads inherit what their maker blocks, so whatever a library starts from these threads takes none either.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Faults belong to the thread that makes them. The native library does the same: see native/src/thread.c.
_FAULTS = {signal.SIGILL, signal.SIGFPE, signal.SIGSEGV, signal.SIGBUS}
# Real-time signals have no handlers here, and Python takes ten times as long to name those that it gives back.
_BLOCKED = {each for each in signal.valid_signals() if each < signal.SIGRTMIN} - _FAULTS


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Opens a context in which the calling thread, and each that it starts, takes no signals; they wait for its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Daemon(threading.Thread):
    """A thread that takes no signals, and that a process which ends does not wait for."""

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        with signals_blocked():
            super().start()


class Threads(ThreadPoolExecutor):
    """A team of threads that take no signals."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Lets a thread call `fn`; see `Executor.submit`."""
        if len(self._threads) == self._max_workers:
            return super().submit(fn, *args, **kwargs)
        with signals_blocked():  # a thread more may be started
            return super().submit(fn, *args, **kwargs)
