"""The graceful shutdown of a server: no new requests are accepted, and those in progress have some time to finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil

from ktcli.errors import Busy
from ktcli.server.http.refusals import Refusal

_ALWAYS_ANSWERED = frozenset({"/health", "/metrics", "/server"})
_TELL_S = 2.0  # in which answers that are ended then tell their clients


class Drain:
    """The count of the requests in progress; for the event loop only.

    Args:
        seconds: that they may take to finish.
    Attributes:
        begun: whether the shutdown has begun.
        running: the requests that are being answered.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun = seconds, False
        self.running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def require_running(self, path: str) -> None:
        """Checks that requests for a path are still answered. Raises: Refusal: they are not, since the server is
        shutting down."""
        if self.begun and not _is_always_answered(path):
            raise _refusal("the server is shutting down and accepts no new requests", self.seconds)

    @contextmanager
    def answering(self, path: str) -> Iterator[None]:
        """Opens a context in which a request for a path counts as in progress, unless the path is always answered.

        Raises:
            Refusal: the server is shutting down.
        """
        self.require_running(path)
        if _is_always_answered(path):
            yield
            return
        self.running += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._quiet.set()

    def give_up(self) -> None:
        """Ends the time that answers have to finish, so that `finished` returns at once."""
        self.seconds = 0.0
        self._quiet.set()

    async def finished(self) -> bool:
        """Waits until no request is in progress, at most the `seconds` of this drain; returns whether all have
        finished."""
        return await self._is_quiet_in(self.seconds)

    async def told(self) -> None:
        """Waits until the clients of cancelled answers have received the error, for at most 2 seconds."""
        if not self.running:
            return
        self._quiet.clear()
        await self._is_quiet_in(_TELL_S)

    async def _is_quiet_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        return not self.running


def _is_always_answered(path: str) -> bool:
    return path in _ALWAYS_ANSWERED or path.startswith("/cancel/")


def shutting_down() -> Busy:
    """Returns the error for a request to a server that is shutting down."""
    return Busy("the server is shutting down", hint="try again once it has restarted")


def cut_off() -> Refusal:
    """Returns the HTTP error, of status 503, for an answer that was cut off because the server shut down."""
    return _refusal("the server shut down before the answer was complete", 0.0)


def _refusal(words: str, seconds: float) -> Refusal:
    again_s = ceil(seconds) + 1  # by then a supervisor has started it anew
    return Refusal(503, words, "", "server_draining", again_s)
