"""Runs the engine as a child: started, asked whether it is ready, ended when told with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from ktcli import certificates
from ktcli.assembly.child import kill, start_beside
from ktcli.client.address import ServerAddress
from ktcli.errors import KtError
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.server.router.asking import ask
from ktcli.server.router.counters import Counters, counters_in
from ktcli.server.router.smg import here
from ktcli.server.sglang.boundedlog import BoundedLog
from ktcli.server.sglang.deaths import why_ended
from ktcli.server.sglang.line import ServerLine
from ktcli.store.engines import InstalledEngine, row_of
from ktcli.threads import Daemon

HEALTH_ANSWER_S = 30.0  # the engine itself answers after 20 s that it is too busy
_COUNTERS_ANSWER_S = 1.0
_LINE_BYTES = 1 << 16
# All files are here: nothing is looked for in the network, or sent there.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class EngineProcess:
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
        try:
            self._child = start_beside(
                engine.python,
                row_of(engine.name).module,
                line.words(),
                environment={**certificates.environment(), **_ENVIRONMENT, **line.variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
            )
        except OSError as error:
            raise KtError(f"cannot start {engine.label}: {error.strerror}") from error
        self.began_s = time.monotonic()
        self._reader = Daemon(self._read, name="kt-engine-log")
        self._reader.start()

    @property
    def pid(self) -> int:
        """The number of its process, and of the group of all that it starts."""
        return self._child.pid

    def ended(self) -> int | None:
        """Returns its exit code; None: it runs."""
        return self._child.poll()

    def answers(self) -> int:
        """Returns the status of its answer to a question about its health; 0: there is none."""
        try:
            return ask(self._address, "/health", self._key, answer_s=HEALTH_ANSWER_S).status
        except KtError:
            return 0

    def counters(self) -> Counters:
        """Returns what it counts; nothing if it does not answer at once."""
        with contextlib.suppress(KtError):
            reply = ask(self._address, "/metrics", self._key, answer_s=_COUNTERS_ANSWER_S)
            return counters_in(reply.body)
        return Counters({})

    def why(self) -> KtError:
        """Returns why it has ended, once it has, with all that it started."""
        self.kill()
        return why_ended(self._engine.label, self._log.lines, self._child.returncode)

    def stop(self) -> None:
        """Tells it to end once its answers have finished."""
        if self.ended() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, with whatever it started, also where it has ended itself."""
        kill(self._child)
        self._reader.join(2.0)

    def memory_bytes(self) -> int:
        """Returns the resident memory of all its processes; what they share counts for each."""
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

    def _read(self) -> None:
        """Keeps what it prints, until everybody who could print has ended."""
        assert self._child.stdout is not None
        with self._child.stdout as output:
            while line := output.readline(_LINE_BYTES):
                self._log.write(line)
