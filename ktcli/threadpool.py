"""Teams of threads that answer with futures; beside `threads`, as what they are made of imports a log of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ktcli.threads import signals_blocked

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A team of threads that take no signals."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Lets a thread of the pool call `fn` with these arguments; returns the future of its result, see
        `Executor.submit`.
        """
        if len(self._threads) == self._max_workers:
            return super().submit(fn, *args, **kwargs)
        with signals_blocked():  # a thread more may be started
            return super().submit(fn, *args, **kwargs)
