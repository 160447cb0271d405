"""Transfers files in order, at most as many as the caller allows; the caller removes them again.

It runs beside whoever uses the files. A file that arrives damaged is fetched once more before that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ktcli.store.partial import Located, PartialFile
from ktcli.store.transfer import Arrived, Transfer, open_chunks
from ktcli.threads import BackgroundCall

POLL_S = 0.1


class BoundedTransfer(Transfer):
    """Transfers files in their order, up to a number that can be raised; see `Transfer`.

    Args:
        folder: where the complete files go; partial ones lie in `scratch`.
        limit_bps: the most bytes per second; None: no limit.
    """

    def __init__(
        self,
        files: Sequence[Located],
        folder: Path,
        scratch: Path,
        limit_bps: int | None = None,
    ) -> None:
        super().__init__(files, folder, scratch, self._note, limit_bps)
        self._places = {id(file): place for place, file in enumerate(self._files)}
        self._allowed = 0
        self._here: set[str] = set()
        self._spared: set[str] = set()  # arrived damaged once
        self._fetching: BackgroundCall[None] | None = None

    def start(self) -> None:
        """Starts a thread that downloads the files that are allowed, see `allow`."""
        self._fetching = BackgroundCall(lambda: self.run(lambda n: None), "kt-stream")

    def allow(self, count: int) -> None:
        """Allows the first `count` files of the transfer to be downloaded."""
        with self._moved:
            self._allowed = count
            self._moved.notify_all()

    def wait_for(self, name: str, waiting: Callable[[], None]) -> None:
        """Waits until the file `name` is downloaded completely and verified.

        Args:
            waiting: called about every POLL_S seconds meanwhile.
        Raises:
            HubError, OSError: the transfer failed, see `run`.
        """
        assert self._fetching is not None, "nothing arrives before the start"
        while name not in self._here:
            if self._fetching.ended and name not in self._here:
                raise self._fetching.error or RuntimeError(f"{name} is not part of this transfer")
            with self._moved:
                self._moved.wait(POLL_S)
            waiting()

    def stop(self) -> None:
        """Stops the transfer, and waits up to two seconds for its thread; files that arrived are kept."""
        self._stop.set()
        if self._fetching is not None:
            self._fetching.wait(2.0)

    def _note(self, arrived: Arrived) -> None:
        with self._moved:
            self._here.add(arrived.located.name)
            self._moved.notify_all()

    def _next(self) -> tuple[PartialFile, int] | None:
        with self._moved:
            while not self._stop.is_set() and len(self._here) < len(self._files):
                if self._queue and self._places[id(self._queue[0][0])] < self._allowed:
                    return self._queue.popleft()
                self._moved.wait(POLL_S)
        return None

    def _again(self, file: PartialFile) -> bool:
        name = file.located.name
        if name in self._spared:
            self._stop.set()  # the others are of no use without it
            return False
        self._spared.add(name)
        with self._moved:
            self._queue.extendleft(reversed(list(open_chunks(file))))
            self._moved.notify_all()
        return True
