"""Handles the signals that tell a process to end; SIGHUP may also ask it to read its files again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_handled(handle: Callable[[int], object], signals: Iterable[int]) -> Iterator[None]:
    """Opens a context in which `handle` is called with the number of the signal whenever one of `signals` comes."""

    def heard(number: int, frame: FrameType | None) -> None:
        handle(number)

    before = {each: signal.signal(each, heard) for each in signals}
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
        """Whether the process was started from a terminal that has been closed since."""
        return bool(self._files) and not any(os.isatty(each) for each in self._files)
