"""Runs smg as a child: started, ready, restarted when it crashes, ended when told; what it logs is passed on."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ktcli import certificates
from ktcli.assembly.child import kill, start_beside
from ktcli.assembly.listener import Listener
from ktcli.errors import KtError
from ktcli.store.engines import InstalledEngine, row_of
from ktcli.threads import Daemon

SETTLE_S = (
    5  # that smg still answers after it was told to end, so that balancers in front of it notice
)
_SPARE_S = 5  # beyond what it was given to end
_KEPT = 40  # of its last lines
_SHOWN = 300
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that smg logged.

    Attributes:
        text: its message and what went wrong.
        is_known: whether it has the form of smg's log.
    """

    text: str
    level: str = ""
    is_known: bool = False


def read_line(line: str) -> LogLine:
    """Returns a line of the log, whose form is JSON; others, such as those of Python, are taken as they are."""
    try:
        said = json.loads(line)
        message, level = str(said["message"]), str(said["level"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return LogLine(line.strip())
    error = said.get("error")
    more = f": {error}" if isinstance(error, str) and error not in message else ""
    return LogLine(f"{message}{more}"[:_SHOWN], level, is_known=True)


# What smg warns of although kt sees to it: keys are missing only where nobody else can reach it; and failing servers,
# of which `health` tells once and not every two seconds.
_NOT_SAID = (
    "SECURITY POSTURE",
    "HTTP health check",
    "Health probe failed",
    "Failed to send typed request",
    "Step failed",
)
_AGAIN_S = 60.0  # after which the same line is said again


class RouterProcess:
    """A running smg.

    Args:
        words: its command line.
        listener: receives the warnings of its log.
    Raises:
        KtError: it cannot be started.
    """

    def __init__(self, engine: InstalledEngine, words: Sequence[str], listener: Listener) -> None:
        self._listener = listener
        self._last: deque[str] = deque(maxlen=_KEPT)
        self._said_s: dict[str, float] = {}
        module = row_of(engine.name).module
        try:
            self._child = start_beside(
                engine.python,
                module,
                words,
                environment=certificates.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise KtError(f"cannot start {engine.label}: {error.strerror}") from error
        self.began_s = time.monotonic()
        self._reader = Daemon(self._read, name="kt-router-log")
        self._reader.start()

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._child.pid

    def ended(self) -> int | None:
        """Returns its exit code; None: it runs."""
        return self._child.poll()

    def wait(self, seconds: float) -> bool:
        """Waits until it has ended; returns whether it has."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def why(self) -> str:
        """Returns why it has ended, by what it said last."""
        self._reader.join(1.0)
        code = self._child.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{self._last[-1][:_SHOWN]} ({how})" if self._last else f"it said nothing ({how})"

    def stop(self) -> None:
        """Tells it to end once its answers have finished."""
        if self.ended() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, with whatever it started."""
        kill(self._child)

    def _read(self) -> None:
        """Passes on what it logs, until it ends."""
        assert self._child.stdout is not None
        with self._child.stdout as output:
            while line := output.readline(_LINE_BYTES):
                self._hear(read_line(line.decode("utf-8", "replace")))

    def _hear(self, line: LogLine) -> None:
        # The banner is drawn in Braille patterns.
        if not line.text or "\u2800" <= line.text[0] <= "\u28ff":
            return
        self._last.append(line.text)
        now = time.monotonic()
        is_new = now - self._said_s.get(line.text, -_AGAIN_S) >= _AGAIN_S
        if line.is_known and is_new and not line.text.startswith(_NOT_SAID):
            self._said_s = {text: at for text, at in self._said_s.items() if now - at < _AGAIN_S}
            self._said_s[line.text] = now
            self._listener.warn(f"smg: {line.text}")


def stop_s(drain_s: float) -> float:
    """Returns the seconds after which a router that was told to end is killed."""
    return SETTLE_S + drain_s + _SPARE_S
