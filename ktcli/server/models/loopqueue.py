"""A thread-to-event-loop queue that delivers the values of one step together, so that a step wakes the loop once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class LoopQueue:
    """A queue of calls from one thread to an event loop.

    Args:
        loop: the loop in which they are called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: list[Callable[[], None]] = []

    def put(self, receive: Callable[[T], None], value: T) -> None:
        """Queues a call of `receive` until `flush`."""
        self._calls.append(partial(receive, value))

    def flush(self) -> None:
        """Schedules the queued calls in the loop, in order; drops them if the loop is closed."""
        if self._calls:
            calls, self._calls = self._calls, []
            try:
                self._loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:  # the loop is closed: nobody waits for them
                return


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Makes calls, all of them: an error of one is raised behind the last."""
    error: Exception | None = None
    for each in calls:
        try:
            each()
        except Exception as raised:
            error = error or raised
    if error is not None:
        raise error
