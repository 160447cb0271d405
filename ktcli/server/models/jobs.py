"""Runs jobs on the main thread, one after the other, for the threads of a server.

Chat templates are hostile input. What stops one that does not end is a signal, and only the main thread gets signals.
So a server's event loop and engine have threads of their own, and the main thread renders.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Jobs:
    """A queue of jobs for the main thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Adds a function to the queue of calls for the main thread; returns the future of its result; callable from
        any thread. A function whose future has been cancelled is not called."""
        made: Future[T] = Future()
        self._queue.put((made, work))
        return made

    async def result(self, work: Callable[[], T]) -> T:
        """Has a function called on the main thread, and returns its result or raises its error; to be awaited in an
        event loop."""
        return await asyncio.wrap_future(self.ask(work))

    def stop(self) -> None:
        """Makes `run` end after the jobs that are queued already; callable from any thread, and from a signal
        handler.
        """
        self._queue.put(None)

    def run(self) -> None:
        """Runs the queued jobs on the calling thread, one after the other, until `stop`."""
        while (job := self._queue.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
