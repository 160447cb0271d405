"""Calls a function on the signals that tell a process to end, instead of ending it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_end_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Opens a context in which `stop` is called for each signal that ends the process; signals that the parent process
    ignored stay ignored.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        stop()

    before = {
        each: signal.signal(each, heard)
        for each in _ENDING
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
