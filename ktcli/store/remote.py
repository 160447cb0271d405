"""A store that may be slow or gone, such as a folder of another machine: no call waits for it longer than a bound.

What may wait for the store is done by threads of its own, into memory of its own: a thread that hangs in a file system
holds nothing that anybody needs, and a process that ends does not wait for it. A store that does not answer in time
rests: it has nothing, and takes nothing, until a listing of it comes in time again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktcli.errors import KtError
from ktcli.pagelabel import Fill, PageKind, PageLabel, U8Array
from ktcli.store.pages import CLOSE_S, PageStore
from ktcli.store.pagewriter import PageWriter
from ktcli.store.readrate import ReadRate
from ktcli.threads import BackgroundCall

OPEN_S = 5.0  # the longest wait for the folder at the start
LOOK_S = 1.0  # the longest wait for a listing
READ_S, READ_S_PER_TOKEN = 2.0, 0.25 / 1024  # the longest wait for records
REST_S = 30.0  # after which a store that did not answer is asked again
STALL_S = 1.5  # in which something has to be written while somebody waits for it
_WRITE_S = 10.0  # for one file, while nobody does


class RemoteStore:
    """A store whose calls have a time limit.

    Args:
        store: the one that does the work.
        heard: its warnings, which its threads append.
        warn: called with a sentence about what went wrong; by the thread that calls this store.
    """

    name = "store"

    def __init__(
        self,
        store: PageStore,
        heard: list[str],
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self._store, self._heard, self._warn = store, heard, warn
        self._rests_until: float | None = None  # `time.monotonic`; None: it answers
        self._complained = False
        self._looking: BackgroundCall[None] | None = None
        self._reading: BackgroundCall[int] | None = None
        self._using: BackgroundCall[None] | None = None
        self.refresh()

    @classmethod
    def open(
        cls,
        path: Path,
        open_store: Callable[[Callable[[str], object]], PageStore],
        warn: Callable[[str], object],
    ) -> RemoteStore:
        """Returns the store of KV pages in a folder, which must open within OPEN_S seconds.

        Args:
            open_store: opens and returns the page store that does the work, which calls the function that it is given
                with each warning.
            warn: called with a sentence about what went wrong; by the thread that calls this store.
        Raises:
            KtError: the store cannot be opened, or not in time.
        """
        heard: list[str] = []
        opening = BackgroundCall(lambda: open_store(heard.append), "kt-open")
        if not opening.wait(OPEN_S):
            raise KtError(f"the KV store {path} does not answer")
        if isinstance(opening.error, OSError):
            raise KtError(f"the KV store {path} cannot be used: {opening.error.strerror}")
        if opening.error is not None:
            raise opening.error
        assert opening.result is not None
        return cls(opening.result, heard, warn)

    @property
    def writer(self) -> PageWriter:
        """The queue and thread that write KV pages and states to the store."""
        return self._store.writer

    @property
    def inner(self) -> PageStore:
        """The page store without time limits that does the work."""
        return self._store

    @property
    def rests(self) -> bool:
        """Whether the store is out of use because it did not respond in time or failed; it is tried again after REST_S
        seconds.
        """
        return self._rests_until is not None

    @property
    def rate(self) -> ReadRate:
        """The predictor of how long reads from the store take."""
        return self._store.rate

    def has(self, kind: PageKind, key: bytes) -> bool:
        """Returns whether the store has a KV page or state of this kind and key, see `PageStore.has`; False while the
        store rests.
        """
        return not self.rests and self._store.has(kind, key)

    def states(self) -> list[tuple[int, bytes, bytes]]:
        """Returns the stored states (what layers such as linear attention keep of a whole prompt prefix) that `has`
        knows of, longest prefix first, as tuples (number of tokens of the prefix, key of its full pages, its own key);
        a key is the hash of a prefix. [] while the store rests.
        """
        return [] if self.rests else self._store.states()

    def refresh(self) -> None:
        """Looks for page files that others wrote or removed. Waits at most LOOK_S seconds (1.0); a listing that takes
        longer continues in the background.
        """
        if self._rests_until is not None:
            self._try_again(self._rests_until)
        elif self._looking is None or self._looking.ended:
            before = self._store.steps
            self._looking = job = BackgroundCall(self._store.refresh, "kt-look")
            if job.wait(LOOK_S) or self._store.steps == before:  # otherwise it goes on
                self._answered(job)
        self._tell()

    def seek(self, labels: Iterable[PageLabel]) -> None:
        """Does nothing: `refresh` lists all stored KV pages and states, so that `has` needs no query."""

    def read(self, labels: Sequence[PageLabel], into: Sequence[U8Array]) -> int:
        """Reads KV pages and states into the arrays `into`; returns how many are intact and in memory, up to the first
        that is not; 0 if the read takes over READ_S seconds plus READ_S_PER_TOKEN for each token, if an earlier one
        still runs, or while the store rests.
        """
        if self.rests or _runs(self._reading):
            return 0
        room = [np.empty_like(memory) for memory in into]  # its own: it may be written late
        self._reading = job = BackgroundCall(lambda: self._store.read(labels, room), "kt-fetch")
        tokens = sum(label.ids.size for label in labels)
        job.wait(READ_S + READ_S_PER_TOKEN * tokens)
        if not self._answered(job):
            self._tell()
            return 0
        came = job.result or 0
        for memory, read in zip(into[:came], room, strict=False):
            memory[:] = read
        return came

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a KV page or state to be written, and returns True; returns False if the store has it already, rests,
        cannot be written or has a full queue.
        """
        if not self.rests and self._store.writer.committing_s > _WRITE_S:
            self._rest("a file could not be written in time")
        return not self.rests and self._store.put(label, size_bytes, fill)

    def use(self, keys: Iterable[bytes]) -> None:
        """Records in the background that the records with these keys are used now, see `PageStore.use`; skipped while
        an earlier call is in progress or the store rests.
        """
        if not self.rests and not _runs(self._using):
            used = list(keys)
            self._using = BackgroundCall(lambda: self._store.use(used), "kt-use")

    def hurry(self) -> None:
        """Makes the writing thread store all queued KV pages and states at once; does not wait for it."""
        if not self.rests:
            self._store.hurry()

    def flush(self, wait_s: float) -> bool:
        """Waits until no KV pages and states are queued any more, at most `wait_s` seconds; returns whether that is so,
        False if the store rests. Those that cannot be written are dropped. Any thread may call it.
        """
        until = time.monotonic() + wait_s
        while not self.rests:
            before, left_s = self._store.counts.written, until - time.monotonic()
            if self._store.writer.flush(min(STALL_S, max(0.0, left_s))):
                return True
            if left_s <= STALL_S:
                return False
            if self._store.counts.written == before:
                self._rest("a file could not be written in time")
        return False

    def close(self) -> None:
        """Writes queued records for at most CLOSE_S seconds, as long as the store accepts them, drops the rest, and
        closes the store.
        """
        self.flush(CLOSE_S)
        self._store.close(0.0)
        self._tell()

    def _answered(self, job: BackgroundCall[Any]) -> bool:
        """Returns whether a job has come to a good end; otherwise the store rests."""
        if not job.ended:
            self._rest("it does not answer in time")
        elif job.error is not None:
            self._rest(str(getattr(job.error, "strerror", None) or job.error))
        return not self.rests

    def _rest(self, why: str) -> None:
        self._rests_until = time.monotonic() + REST_S
        if not self._complained:
            self._complained = True
            self._heard.append(
                f"kt goes on without the KV store {self._store.path}, and tries again later: {why}"
            )

    def _try_again(self, rests_until: float) -> None:
        """Looks again, after a while, without waiting for it; a look that came to its end ends the rest."""
        if time.monotonic() < rests_until or _runs(self._looking) or _runs(self._reading):
            return
        if self._looking is not None and self._looking.began_s >= rests_until:
            answered = self._looking.error is None and self._looking.took_s <= LOOK_S
            self._rests_until = None if answered else time.monotonic() + REST_S
        else:
            self._looking = BackgroundCall(self._store.refresh, "kt-look")

    def _tell(self) -> None:
        self._store.tell()
        while self._heard:
            self._warn(self._heard.pop(0))


def _runs(job: BackgroundCall[Any] | None) -> bool:
    return job is not None and not job.ended
