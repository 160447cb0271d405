"""The errors of kt, worded for the person who can act on them.

Library code raises these and never prints. A message is one sentence with the offending values; `hint`
is what to do next, a command where there is one. `ktcli.main` turns them into text and an exit code.

    KtError
    ├── UsageError
    ├── NotFound
    ├── NotEnoughMemory
    ├── NoMemoryLeft
    ├── NotEnoughDisk
    ├── NotFinite
    ├── BadCheckpoint
    │   └── BadPack
    ├── NetworkError
    │   ├── HubError
    │   │   └── Gated
    │   └── ServerFailed
    │       └── ServerBusy
    ├── Busy
    ├── QueueFull
    ├── ContextFull
    ├── NativeError
    └── DeviceError
        ├── OutOfDeviceMemory
        └── KernelFails
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """The exit codes of kt, with their meaning for authors of scripts."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        made = int.__new__(cls, code)
        made._value_ = code
        made.meaning = meaning
        return made

    OK = 0, "success"
    FAILED = 1, "a failure without a code of its own, or you answered no"
    USAGE = 2, "the command line, a variable or a request is invalid"
    NOT_FOUND = 3, "a model, a file or a name does not exist"
    NO_ROOM = 4, "not enough memory or disk space"
    DAMAGED = 5, "a model's files are damaged, hostile or of an unknown kind"
    NO_DOWNLOAD = 6, "a hub, a server or the network failed"
    BUSY = 7, "another process holds the lock, or too many requests wait"
    CONTEXT_FULL = 8, "the conversation does not fit the context"
    NO_KERNELS = 9, "the native library is missing or cannot be used"
    NO_DEVICE = 10, "the GPU, its driver or torch failed, or its memory is full"
    INTERNAL = 70, "internal error; KT_DEBUG=1 shows the traceback"  # EX_SOFTWARE of sysexits.h
    # 128 + SIGINT, what a shell reports.
    INTERRUPTED = 130, "interrupted with Ctrl-C; finished work is kept"


def gib(size_bytes: int | float) -> str:
    """Returns a number of bytes for people: '3.2 GiB', '17 MiB', '512 B'."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration(seconds: float) -> str:
    """Returns a duration in seconds for people: "0.3 s", "45 s", "12 min", "3 h 20 min"."""
    minutes = round(seconds / 60)
    if seconds < 3:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def counted(count: int, what: str) -> str:
    """Returns a number and its noun, with an s unless the number is 1: '1 run', '1,200 runs'."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


LONGEST_WORD, LONGEST_SENTENCE = 400, 2000  # characters of what is said; a person reads no more
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def shortened(text: str) -> str:
    """Returns a text for an error or note in which words longer than 400 characters (paths, texts of a hub or a file)
    lack their middle, as does the text itself if it is still longer than 2000.
    """
    words = _LONG_WORD.sub(lambda found: _without_middle(found[0], LONGEST_WORD), text)
    return _without_middle(words, LONGEST_SENTENCE)


def _without_middle(text: str, most: int) -> str:
    end = most // 3
    return text if len(text) <= most else f"{text[: most - end - 1]}…{text[-end:]}"


def predicted(tok_s: float) -> str:
    """Returns a predicted speed in tokens per second for people, with two significant digits: '1.6', '16', '160',
    '5,300'; below 1 with one decimal.
    """
    digits = float(f"{tok_s:.2g}")
    return f"{digits:.1f}" if digits < 10 else f"{digits:,.0f}"


class KtError(Exception):
    """The base of every error that kt reports in one sentence.

    Args:
        message: one sentence, with the offending values; long ones are shortened.
        hint: the advice what to do next; shown on its own line.
    Attributes:
        usual_hint: the advice where none is given.
    """

    exit_code: ExitCode = ExitCode.FAILED
    usual_hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(shortened(message))
        self.hint = hint or self.usual_hint


@contextmanager
def hinted(hint: str) -> Iterator[None]:
    """Opens a context in which a KtError without a hint gets this one."""
    try:
        yield
    except KtError as error:
        error.hint = error.hint or hint
        raise


@contextmanager
def interrupted(said: str) -> Iterator[None]:
    """Opens a context in which Ctrl-C raises KeyboardInterrupt with the sentence `said`, about how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(said) from None


@contextmanager
def refusals(said: str, *, hint: str = "") -> Iterator[None]:
    """Opens a context in which an OSError becomes a KtError whose message is `said` and the system's reason: "cannot
    write FILE: No space left on device".
    """
    try:
        yield
    except OSError as error:
        raise KtError(f"{said}: {error.strerror}", hint=hint) from error


class UsageError(KtError):
    """The command line or a request does not make sense."""

    exit_code = ExitCode.USAGE


class NotFound(KtError):
    """A model, file or name does not exist."""

    exit_code = ExitCode.NOT_FOUND


class NotEnoughMemory(KtError):
    """The plan needs more bytes than the machine has free."""

    exit_code = ExitCode.NO_ROOM
    usual_hint = (
        "try a shorter --context or a smaller format, for example: kt convert NAME --experts int4"
    )

    def __init__(
        self, what: str, need: int, have: int, *, node: int | None = None, hint: str = ""
    ) -> None:
        where = "" if node is None else f" on NUMA node {node}"
        said = f"{what} needs {gib(need)} of memory{where}, but only {gib(have)} is free"
        super().__init__(said, hint=hint)


class NoMemoryLeft(KtError):
    """Raised when the system gives this process no more memory, whatever was planned."""

    exit_code = ExitCode.NO_ROOM
    usual_hint = "kt plan MODEL shows what a model needs"


class NotEnoughDisk(KtError):
    """A write needs more bytes than the disk has free."""

    exit_code = ExitCode.NO_ROOM

    def __init__(self, what: str, need: int, have: int, where: str) -> None:
        super().__init__(
            f"{what} needs {gib(need)} on disk, but only {gib(have)} is free in {where}",
            hint="free some space (kt list shows sizes, kt rm NAME removes a model) and run the command again",
        )


class NotFinite(KtError):
    """Raised when a training step gives NaN or infinite numbers."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} contains NaN or infinite numbers",
            hint="the training has diverged: begin with an earlier adapter, and use a lower learning rate",
        )


class BadCheckpoint(KtError):
    """A model's files are damaged, hostile or of an unknown kind."""

    exit_code = ExitCode.DAMAGED


class BadPack(BadCheckpoint):
    """A converted model's files are damaged."""


class NetworkError(KtError):
    """Raised when a request over the network fails, is refused, or finds nothing.

    Args:
        again_s: the seconds after which the same question may be answered, 0 where nobody says how many; None: it
            does not help to ask again.
    """

    exit_code = ExitCode.NO_DOWNLOAD

    def __init__(self, message: str, *, hint: str = "", again_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.again_s = again_s


class HubError(NetworkError):
    """A download failed."""


class ServerFailed(NetworkError):
    """Raised when a server refuses a request, fails, ends the connection or is not there."""


class ServerBusy(ServerFailed):
    """A server has too much to do, or is about to end."""

    exit_code = ExitCode.BUSY


class Gated(HubError):
    """A repository is gated: its licence must be accepted first."""


class Busy(KtError):
    """Raised when another process holds the lock."""

    exit_code = ExitCode.BUSY


class QueueFull(KtError):
    """Raised when too many requests are waiting."""

    exit_code = ExitCode.BUSY

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"{length} requests are already waiting; the maximum is {limit}",
            hint="try again once some have been answered",
        )


class ContextFull(KtError):
    """The conversation does not fit the context."""

    exit_code = ExitCode.CONTEXT_FULL


class NativeError(KtError):
    """The native library is missing or refused an argument."""

    exit_code = ExitCode.NO_KERNELS


class DeviceError(KtError):
    """Raised when the GPU, its driver or torch failed, or is missing."""

    exit_code = ExitCode.NO_DEVICE
    usual_hint = "--device cpu runs without the GPU"

    def bare(self) -> Self:
        """Returns the same error without a traceback, which would keep the engine that failed in memory."""
        return type(self)(str(self), hint=self.hint)


class OutOfDeviceMemory(DeviceError):
    """The GPU's memory is full."""


class KernelFails(DeviceError):
    """Raised when a Triton kernel cannot be compiled for the GPU, or not be launched there."""
