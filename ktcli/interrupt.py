"""Lets Ctrl-C stop an answer without damaging the session.

An exception out of nowhere could land between two halves of a step. So the first Ctrl-C only sets a
flag, which is looked at between tokens and between chunks of the prompt; the second raises. Where nothing can be
torn apart (`stoppable`: the work is done in a helper process) the first raises.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_stoppable: list[bool] = []  # not empty: in `stoppable`, in the main thread


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Opens a context in which Ctrl-C raises KeyboardInterrupt at once, also where an `Interrupt` would only set a
    flag. Outside the main thread it changes nothing.
    """
    mine = threading.current_thread() is threading.main_thread()
    if mine:
        _stoppable.append(True)
    try:
        yield
    finally:
        if mine:
            _stoppable.pop()


class Interrupt:
    """A context in which Ctrl-C sets `asked` instead of raising; outside the main thread it changes nothing."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._mine = threading.current_thread() is threading.main_thread()

    def __call__(self) -> bool:
        """Returns whether Ctrl-C was pressed."""
        return self.asked

    def __enter__(self) -> Interrupt:
        if self._mine:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or _stoppable:
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True
