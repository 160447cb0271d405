"""Reports the progress of a server to whatever started it: systemd, or `kt serve --background`.

Both receive datagrams of lines NAME=VALUE at the socket that NOTIFY_SOCKET names (sd_notify(3)). READY=1 says that
requests are answered, STATUS is a sentence for people; DONE and TOTAL, which systemd does not know, are the progress of
what STATUS says.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ktcli.assembly.listener import Bar, Listener

VARIABLE = "NOTIFY_SOCKET"
READY, STATUS, DONE, TOTAL = "READY", "STATUS", "X_KT_DONE", "X_KT_TOTAL"
MOST_BYTES = 4096  # of a datagram
_EVERY_S = 0.1  # progress is told


class Supervisor:
    """The connection to the process that started this one and waits until it is ready; none, unless the environment
    names it.
    """

    def __init__(self) -> None:
        # Processes that this one starts have nothing to tell.
        name = os.environ.pop(VARIABLE, "")
        self._address = "\0" + name[1:] if name.startswith("@") else name

    def tell(self, **values: object) -> None:
        """Sends a datagram; lost if the supervisor has ended, or does not read."""
        if not self._address:
            return
        lines = (f"{name}={' '.join(str(value).split())}" for name, value in values.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
            made.setblocking(False)
            try:
                made.sendto("\n".join(lines).encode()[:MOST_BYTES], self._address)
            except OSError:
                return

    def ready(self, said: str) -> None:
        """Sends that requests are answered from now on.

        Args:
            said: a sentence about it.
        """
        self.tell(**{READY: 1, STATUS: said})


def values_of(datagram: bytes) -> dict[str, str]:
    """Returns the values in a datagram, by their names."""
    lines = datagram.decode("utf-8", "replace").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


class SupervisedListener:
    """A listener whose progress is sent to a supervisor as well.

    Args:
        listener: receives everything.
    """

    def __init__(self, listener: Listener, supervisor: Supervisor) -> None:
        self._listener, self._supervisor = listener, supervisor

    def note(self, text: str) -> None:
        """Passes a note on to the listener."""
        self._listener.note(text)

    def warn(self, text: str) -> None:
        """Passes a warning on to the listener."""
        self._listener.warn(text)

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Passes an offer to pull on to the listener, which raises to refuse it."""
        self._listener.agree(offer, command)

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[Bar]:
        """Returns the listener's progress bar, whose progress is sent to the supervisor as well."""
        return self._bar(title, total, unit, done)

    @contextmanager
    def _bar(self, title: str, total: int | None, unit: str, done: int) -> Iterator[Bar]:
        with self._listener.progress(title, total, unit=unit, done=done) as bar:
            yield _ToldBar(bar, self._supervisor, title, total, done)


class _ToldBar:
    """A progress bar whose progress is sent to a supervisor now and then; any thread may move it."""

    def __init__(
        self, bar: Bar, supervisor: Supervisor, title: str, total: int | None, done: int
    ) -> None:
        self._bar, self._supervisor = bar, supervisor
        self._title, self._total, self._done = title, total, done
        self._told_s = 0.0
        self._lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        self._bar.advance(amount)
        with self._lock:
            self._done += amount
        self._tell()

    def update(self, *, done: int, total: int | None = None) -> None:
        self._bar.update(done=done, total=total)
        with self._lock:
            self._done, self._total = done, self._total if total is None else total
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_s < _EVERY_S:
            return
        self._told_s = now
        done, total = self._done, self._total
        percent = f" {100 * done // total} %" if total else ""
        self._supervisor.tell(
            **{STATUS: f"{self._title}{percent}", DONE: done, TOTAL: total or 0},
        )
