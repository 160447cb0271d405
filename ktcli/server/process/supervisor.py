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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        """Sends values to the supervisor, as lines NAME=VALUE of a datagram; they are lost if there is no supervisor,
        or if it does not read them."""
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
        """Tells the supervisor that the server answers requests from now on.

        Args:
            said: a sentence about the server, for people.
        """
        self.tell(**{READY: 1, STATUS: said})


def values_of(datagram: bytes) -> dict[str, str]:
    """Returns the values in a datagram of lines NAME=VALUE, by their names."""
    lines = datagram.decode("utf-8", "replace").splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


class WatchedListener:
    """A listener that passes everything on to another one, and progress to a function as well.

    Args:
        listener: receives everything.
        watch: returns for the title of a progress bar a function that is called with what is done, and the total,
            before the bar of the other listener moves, by whatever thread moves it; it may raise.
    """

    def __init__(
        self, listener: Listener, watch: Callable[[str], Callable[[int, int | None], object]]
    ) -> None:
        self._listener, self._watch = listener, watch
        self.note, self.warn, self.agree = listener.note, listener.warn, listener.agree

    @contextmanager
    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> Iterator[Bar]:
        """Yields the progress bar of the wrapped listener, which also reports each change to the function that `watch`
        returned for `title`."""
        with self._listener.progress(title, total, unit=unit, done=done) as bar:
            yield _WatchedBar(bar, self._watch(title), total, done)


class _WatchedBar:
    def __init__(
        self, bar: Bar, moves: Callable[[int, int | None], object], total: int | None, done: int
    ) -> None:
        self._bar, self._moves, self._total, self._done = bar, moves, total, done
        self._lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self._done += amount
        self._moves(self._done, self._total)
        self._bar.advance(amount)

    def update(self, *, done: int, total: int | None = None) -> None:
        with self._lock:
            self._done, self._total = done, self._total if total is None else total
        self._moves(self._done, self._total)
        self._bar.update(done=done, total=total)


class SupervisedListener(WatchedListener):
    """A listener whose progress is sent to a supervisor as well, now and then."""

    def __init__(self, listener: Listener, supervisor: Supervisor) -> None:
        super().__init__(listener, lambda title: _ProgressNotices(supervisor, title).tell)


class _ProgressNotices:
    """Sends the progress of one thing to a supervisor."""

    def __init__(self, supervisor: Supervisor, title: str) -> None:
        self._supervisor, self._title, self._told_s = supervisor, title, 0.0

    def tell(self, done: int, total: int | None) -> None:
        """Sends how much is done, unless that was just said."""
        now = time.monotonic()
        if now - self._told_s < _EVERY_S:
            return
        self._told_s = now
        percent = f" {100 * done // total} %" if total else ""
        said = f"{self._title}{percent}"
        self._supervisor.tell(**{STATUS: said, DONE: done, TOTAL: total or 0})
