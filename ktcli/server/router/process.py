"""Runs smg as a child: started, ready, restarted when it crashes, ended when told; what it logs is passed on."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence

from ktcli import certificates
from ktcli.assembly.child import LoggedChild
from ktcli.assembly.listener import Listener
from ktcli.records import dataclass
from ktcli.store.engines import InstalledEngine, row_of

# That smg still answers after it was told to end, so that balancers in front of it notice.
SETTLE_S = 5
_SPARE_S = 5  # beyond what it was given to end
_KEPT = 40  # of its last lines
_SHOWN = 300


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
    """Returns the message and level of a line of smg's log, which is JSON; any other line, such as one of Python's, is
    the message."""
    try:
        said = json.loads(line)
        message, level = str(said["message"]), str(said["level"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return LogLine(line.strip())
    error = said.get("error")
    more = f": {error}" if isinstance(error, str) and error not in message else ""
    return LogLine(f"{message}{more}"[:_SHOWN], level, is_known=True)


# What smg warns of although kt sees to it: keys are missing only where nobody else can reach it; and failing servers,
# of which `HealthLog` tells once and not every two seconds.
_NOT_SAID = (
    "SECURITY POSTURE",
    "HTTP health check",
    "Health probe failed",
    "Failed to send typed request",
    "Step failed",
)
_AGAIN_S = 60.0  # after which the same line is said again


class RouterProcess(LoggedChild):
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
        super().__init__(
            engine.label,
            engine.python,
            row_of(engine.name).module,
            words,
            lambda line: self._hear(read_line(line.decode("utf-8", "replace"))),
            environment=certificates.environment(),
        )

    def why(self) -> str:
        """Returns the reason why the router process has ended, for people: its last message, and its exit code or
        signal."""
        self.heard()
        code = self.ended()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{self._last[-1][:_SHOWN]} ({how})" if self._last else f"it said nothing ({how})"

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
    """Returns the seconds after which a router that was asked to end is killed: `drain_s`, in which answers may finish,
    plus 10."""
    return SETTLE_S + drain_s + _SPARE_S
