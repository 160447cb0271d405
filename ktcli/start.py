"""The program's first line and its last: what must hold before anything is imported, and after everything ran.

Loading the program takes a tenth of a second, in which Ctrl-C must not show a traceback of imports; and a shell
may start it with closed streams, whose numbers the next opened files would get. So this module imports nothing
that is not there anyway, and `main` comes after it.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130  # ExitCode.INTERRUPTED, before anything can be imported
# Imports make a hundred thousand objects that all stay; the interpreter would look for dead cycles among them at
# every 700th, which takes a tenth of the time until the first answer. So it does not look before there are more.
_GARBAGE_THRESHOLD = 150_000


def run() -> None:
    """The entry point of the console script."""
    mine = False
    try:
        # A program that is started in the background may find Ctrl-C ignored; it stays so.
        mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if mine:
            signal.signal(signal.SIGINT, _leave)
        _fill_closed_streams()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        from ktcli.main import run as program

        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        program()
    except KeyboardInterrupt:  # outside of what `main` guards
        _leave()
    finally:
        if mine:
            signal.signal(signal.SIGINT, _leave)  # the interpreter's own end takes a moment, too


def _leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(EXIT_INTERRUPTED)


class _Closed(io.TextIOBase):
    """Stands for a standard output that is closed: writing to it is an error that has a sentence."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "standard output is closed")


def _fill_closed_streams() -> None:
    """Give the numbers of closed streams to the null device, so that no file of the program gets them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open as long as the program runs
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
