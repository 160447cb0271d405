"""Starts a server that keeps running without its terminal: in its own session, with a log file next to its socket.

The child is the same command without `--background`. It tells by the protocol of systemd how far it is, see
`supervisor`; what it prints goes to the log, which it keeps short itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ktcli import config
from ktcli.errors import ExitCode, KtError
from ktcli.records import dataclass
from ktcli.server.process.discovery import END_S
from ktcli.server.process.endsignals import signals_handled
from ktcli.server.process.supervisor import (
    DONE,
    MOST_BYTES,
    READY,
    STATUS,
    TOTAL,
    VARIABLE,
    values_of,
)
from ktcli.store.places import run_folder

LOG_BYTES = 1 << 20  # a log that has more loses its older half
# A module of that name in the working folder is another program's.
PROGRAM = (sys.executable, "-P", "-m", "ktcli")

# progress(a sentence; what is done, and of how much, 0: unknown)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A background server that is ready.

    Attributes:
        said: what it says of itself.
        warnings: what it had to say meanwhile, line by line.
    """

    pid: int
    log: Path
    said: str
    warnings: tuple[str, ...]


class NotStarted(KtError):
    """Raised when a background server ended before it was ready."""


def log_path(port: int) -> Path:
    """Returns the path of the log file of a background server on a port."""
    return run_folder() / f"{port}.log"


def start(words: Sequence[str], port: int, progress: Progress) -> Started:
    """Starts a server in the background and waits until it is ready; returns its process id, its log's path, its report
    and its warnings. If that is interrupted, or this process is told to end, the server is stopped again.

    Args:
        words: the words of the command line after `kt`.
        port: where it will listen.
    Raises:
        NotStarted: the server ended before it was ready, with its exit code and reason. KtError: the log cannot be
            made.
        SystemExit: a signal told this process to end.
    """
    path = log_path(port)
    with (
        _opened_log(path) as log,
        _notices() as (notices, address),
        _ended_by_signals() as signals,
    ):
        began = os.fstat(log).st_size
        child = subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **config.environment(), VARIABLE: address},
            cwd="/",  # no disk is kept from being unmounted
            start_new_session=True,
        )
        try:
            said = _ready(child, notices, signals, progress)
        except BaseException:
            _end(child)
            raise
    lines = [each for line in _lines_from(path, began) for each in _said(line)]
    if said is None:
        raise _not_started(words[0], child.returncode, lines, path)
    child.returncode = 0  # nobody here waits for it any more
    warnings = tuple(line for line in lines if line != said and not line.startswith(f"{said};"))
    return Started(child.pid, path, said, warnings)


def shorten(path: Path, descriptor: int = 2) -> None:
    """Cuts the log file at `path` down to lines of its last 512 KiB if it has more than 1 MiB, and if it is the file
    that this process writes to `descriptor`."""
    with contextlib.suppress(OSError):
        mine, named = os.fstat(descriptor), os.stat(path)
        if not os.path.samestat(mine, named) or mine.st_size <= LOG_BYTES:
            return
        with path.open("rb") as file:
            file.seek(-LOG_BYTES // 2, os.SEEK_END)
            kept = file.read().partition(b"\n")[2]
        os.ftruncate(descriptor, 0)
        os.write(descriptor, kept)  # the log is open for appending


@contextlib.contextmanager
def _opened_log(path: Path) -> Iterator[int]:
    """Yields a descriptor of the log, which only its owner can read, opened for appending.

    Raises:
        KtError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(made).st_mode):
            os.close(made)
            raise KtError(f"cannot write the log {path}: it is not a regular file")
        os.fchmod(made, 0o600)
    except OSError as error:
        raise KtError(f"cannot write the log {path}: {error.strerror}") from error
    try:
        yield made
    finally:
        os.close(made)


@contextlib.contextmanager
def _notices() -> Iterator[tuple[socket.socket, str]]:
    """Yields a socket that receives the progress of a child, and its address."""
    with (
        tempfile.TemporaryDirectory(prefix="kt-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made,
    ):
        address = f"{folder}/notices"
        try:
            made.bind(address)
        except OSError as error:
            raise KtError(
                f"cannot create the socket {address}: {error.strerror or error}"
            ) from error
        yield made, address


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[int]:
    """Yields a pipe of the numbers of signals that would end this process, which they do not meanwhile; signals that
    the parent set to be ignored stay ignored."""
    gives, takes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    told = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL
    ]
    try:
        with signals_handled(lambda number: os.write(takes, bytes([number])), told):
            yield gives
    finally:
        os.close(gives)
        os.close(takes)


def _ready(
    child: subprocess.Popen[bytes], notices: socket.socket, signals: int, progress: Progress
) -> str | None:
    """Waits until a child is ready, and returns what it says of itself; None: it has ended.

    Raises:
        SystemExit: a signal came.
    """
    process = os.pidfd_open(child.pid)
    try:
        while True:
            ready = select.select([notices.fileno(), process, signals], [], [])[0]
            if signals in ready:
                raise SystemExit(128 + os.read(signals, 1)[0])
            if notices.fileno() not in ready:
                child.wait()
                return None
            values = values_of(notices.recv(MOST_BYTES))
            said = values.get(STATUS, "")
            if values.get(READY) == "1":
                return said
            done, total = (_number(values.get(name, "")) for name in (DONE, TOTAL))
            progress(said, done, total)
    finally:
        os.close(process)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child whose start was interrupted."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _lines_from(path: Path, began: int) -> list[str]:
    """Returns the lines of a log from a byte on that are not blank, of the last 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(began, size), size - (1 << 16)))
            lines = file.read().decode("utf-8", "replace").splitlines()
            return [line for line in lines if line.strip()]
    except OSError:
        return []


def _not_started(command: str, code: int, lines: list[str], log: Path) -> NotStarted:
    """Returns the error of a server that has ended: its own error if it printed one, else its last line."""
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    said = lines[errors[-1] :] if errors else lines[-1:]
    reason = said[0].removeprefix("error: ") if said else "it printed nothing"
    hints = [line.strip() for line in said[1:]]
    made = NotStarted(
        f"kt {command} did not start: {reason}", hint="; ".join([*hints, f"its log is {log}"])
    )
    codes = {int(each): each for each in ExitCode if each is not ExitCode.OK}
    made.exit_code = codes.get(code, ExitCode.FAILED)
    return made


def _said(line: str) -> list[str]:
    """Returns the lines for people of a line of the log, which may be JSON."""
    try:
        found = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(found, dict) or "message" not in found:
        return [line]
    level, hint = found.get("level"), found.get("hint")
    word = "" if level == "info" else f"{level}: "
    return [f"{word}{found['message']}", *([f"  {hint}"] if hint else [])]
