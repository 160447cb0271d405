"""Runs the engine as a child: started, asked whether it is ready, ended when told with all that it started.

What it prints is kept in a file that only its owner can read and that never grows beyond a bound.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

from ktcli import certificates
from ktcli.assembly.child import LoggedChild
from ktcli.client.address import ServerAddress
from ktcli.errors import KtError
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.server.router.asking import ask, counters_of
from ktcli.server.router.counters import Counters
from ktcli.server.router.smg import here
from ktcli.server.sglang.failures import why_ended
from ktcli.server.sglang.line import ServerLine
from ktcli.store.engines import InstalledEngine, row_of

LOG_BYTES = 1 << 20  # a log that has more loses its older half
_KEPT, _KEPT_CHARS = 200, 500  # of the last lines, for the reason why it ended


class BoundedLog:
    """The log of an engine.

    Args:
        path: the file; what an earlier engine wrote there is dropped.
    Raises:
        KtError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: deque[str] = deque(maxlen=_KEPT)
        self._size = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o600)
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise KtError(f"cannot write the log {path}: {error.strerror}") from error

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines that the engine printed, up to 200, oldest first, each shortened."""
        return tuple(self._last)

    def forget(self) -> None:
        """Clears the last lines in memory, not those of the log file: another process begins."""
        self._last.clear()

    def write(self, line: bytes) -> None:
        """Adds a line to the log file and to `lines`; the file loses it if the disk is full."""
        text = line.decode("utf-8", "replace").strip()
        if text:
            self._last.append(text[-_KEPT_CHARS:])
        try:
            if self._size + len(line) > LOG_BYTES:
                self._shorten()
            self._size += os.write(self._file, line)
        except OSError:
            return

    def close(self) -> None:
        """Closes the log file, which gets no later lines."""
        file, self._file = self._file, -1
        os.close(file)

    def _shorten(self) -> None:
        kept = os.pread(self._file, LOG_BYTES // 2, max(0, self._size - LOG_BYTES // 2))
        kept = kept.partition(b"\n")[2]
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._size = os.write(self._file, kept)


HEALTH_ANSWER_S = 30.0  # the engine itself answers after 20 s that it is too busy
_COUNTERS_ANSWER_S = 1.0
# All files are here: nothing is looked for in the network, or sent there.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class EngineProcess(LoggedChild):
    """A running engine.

    Args:
        line: its command line.
        log: receives what it prints.
    Raises:
        KtError: it cannot be started.
    """

    def __init__(self, engine: InstalledEngine, line: ServerLine, log: BoundedLog) -> None:
        self._engine, self._log = engine, log
        host, port, key = (line.value(flag) or "" for flag in ("--host", "--port", "--api-key"))
        self._address, self._key = ServerAddress("http", here(host), int(port)), key
        log.forget()
        super().__init__(
            engine.label,
            engine.python,
            row_of(engine.name).module,
            line.words(),
            log.write,
            environment={**certificates.environment(), **_ENVIRONMENT, **line.variables},
            cwd="/",
        )

    def answers(self) -> int:
        """Returns the HTTP status with which the engine answers `/health`; 0: it does not respond."""
        try:
            return ask(self._address, "/health", self._key, answer_s=HEALTH_ANSWER_S).status
        except KtError:
            return 0

    def counters(self) -> Counters:
        """Returns the engine's Prometheus counters, empty if it does not respond within a second."""
        return counters_of(self._address, self._key, _COUNTERS_ANSWER_S)

    def why(self) -> KtError:
        """Kills what is left of the engine and its processes; returns the error that says why the engine has ended."""
        self.kill()
        return why_ended(self._engine.label, self._log.lines, self.ended())

    def memory_bytes(self) -> int:
        """Returns the resident memory of all processes of the engine, in bytes; memory that they share counts once for
        each."""
        found = (resident_bytes(SYSTEM_ROOT, each) for each in self._group())
        return sum(each or 0 for each in found)

    def _group(self) -> list[int]:
        """The processes of its group."""
        members = list[int]()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(folder.name)) == self.pid:
                        members.append(int(folder.name))
        return members
