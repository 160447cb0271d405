"""The first and the last line of the program: what must be set up before any import, and what must be done at the
end.

Loading the program takes a tenth of a second, in which Ctrl-C must not show a traceback of imports; and a shell
may start it with closed streams, whose numbers the next opened files would get. So this module imports nothing
that is not there anyway (`_signal` is the part of `signal` that the interpreter has in it), and `main` comes after it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import codecs
import errno
import gc
import io
import os
import sys
import time

TYPE_CHECKING = False  # typing itself takes longer to import than everything here
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

EXIT_INTERRUPTED = 130  # ExitCode.INTERRUPTED, before anything can be imported
EXIT_NO_ROOM = 4  # ExitCode.NO_ROOM
# Imports make a hundred thousand objects that all stay; the interpreter would look for dead cycles among them at
# every 700th, which takes a tenth of the time until the first answer. So it does not look before there are more.
_GARBAGE_THRESHOLD = 150_000
_ESCAPED = "kt-escaped"  # how characters are written that a stream's encoding lacks
_SOON_S = 0.001


def run() -> None:
    """Runs the command line of this process and ends it with its exit code; the entry point of the console script."""
    mine = False
    try:
        # A program that is started in the background may find Ctrl-C ignored; it stays so.
        mine = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        if mine:
            _signal.signal(_signal.SIGINT, _leave)
            sys.unraisablehook = _interrupt_again
        _fill_closed_streams()
        _write_any_character()
        _start_few_threads()
        gc.set_threshold(_GARBAGE_THRESHOLD)
        from ktcli.main import run as program

        if mine:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        program()
    except KeyboardInterrupt:  # outside of what `main` guards
        _leave()
    except MemoryError:  # not even for an error's words
        _end(b"error: the system is out of memory\n", EXIT_NO_ROOM)
    finally:
        # At its end the interpreter looks for dead cycles three times, among all that a command has imported: a fifth
        # of the time of a short one. The process ends, so there is nothing to gain; what must be closed was closed.
        gc.freeze()
        try:
            if mine:
                # The interpreter's own end takes a moment, too.
                _signal.signal(_signal.SIGINT, _leave)
        except KeyboardInterrupt:
            _leave()


def _leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    _end(b"error: interrupted\n", EXIT_INTERRUPTED)


def _end(said: bytes, code: int) -> NoReturn:
    try:
        os.write(2, said)
    finally:
        os._exit(code)


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Interrupts once more, a moment later, where Ctrl-C came in a place that cannot raise, as the end of an object."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return

    def soon() -> None:
        time.sleep(_SOON_S)
        _thread.interrupt_main()

    _thread.start_new_thread(soon, ())


def _write_any_character() -> None:
    """Lets standard streams write characters that their encoding lacks as JSON and Python write them, and read any."""
    codecs.register_error(_ESCAPED, _escaped)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper) or stream.errors in ("ignore", "replace"):
            continue
        if stream is not sys.stdin:
            stream.reconfigure(errors=_ESCAPED)
        elif not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """The characters of an error as UTF-16 in escapes, and where text goes on behind them."""
    assert isinstance(error, UnicodeEncodeError)
    raw = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    units = (raw[at : at + 2].hex() for at in range(0, len(raw), 2))
    return "".join(f"\\u{unit}" for unit in units), error.end


def _start_few_threads() -> None:
    """Keeps numpy's BLAS, which kt needs nothing of, from threads and their memory, unless somebody asked for them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


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
