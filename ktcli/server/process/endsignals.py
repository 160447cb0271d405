"""Handles the signals that tell a process to end; SIGHUP may also ask it to read its files again."""

from __future__ import annotations

import os
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


class StartingTerminal:
    """The terminal from which the process was started, if there was one."""

    def __init__(self) -> None:
        self._files = [each for each in range(3) if os.isatty(each)]

    @property
    def is_closed(self) -> bool:
        """Whether there was a terminal and it is closed; `isatty` is false for a closed one."""
        return bool(self._files) and not any(os.isatty(each) for each in self._files)
