"""Writes KV pages in batches on one thread of low priority, which hardly disturbs computations.

Records wait in a queue until there are enough of them for a file, or until somebody asks for the rest. Their bytes
stay where they are until the thread copies them; a page whose memory was needed meanwhile is left out. While the
engine is busy the thread rests most of the time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ktcli.pagelabel import Fill, PageLabel
from ktcli.records import dataclass
from ktcli.store.pagefile import Image, Space
from ktcli.threads import Daemon

BUSY_SHARE = 0.01  # of one core's time, while the engine is busy
_REST_S = 0.5  # the longest rest, after which it looks whether the engine is still busy
NICE = 19
_RETRY_S = 0.2
MAX_WAITING = 1 << 16  # records


@dataclass(frozen=True, slots=True)
class Target:
    """The functions that receive the batches of a writer.

    Attributes:
        batch_bytes: the fewest bytes of data of a file, but for the rest of a queue.
        wanted: tells which records are not stored yet.
        commit: stores a file; False if somebody else is writing, and it may be tried again.
        written: called when the queue is empty, after the last file.
    """

    space: Space
    batch_bytes: int
    wanted: Callable[[Sequence[PageLabel]], list[bool]]
    commit: Callable[[Image], bool]
    written: Callable[[], None]


class _Due(NamedTuple):
    label: PageLabel
    size_bytes: int
    fill: Fill


class PageWriter:
    """A queue of records, and the thread that stores them, which starts with the first.

    Args:
        nice: what its thread gives way to others by; 0: it has to be in time.
    Attributes:
        busy: tells whether the engine computes at this moment.
        dropped: the records that were given up: the queue was full, or the end had to come.
    """

    def __init__(self, target: Target, nice: int = NICE) -> None:
        self._target, self._nice = target, nice
        self._queue: deque[_Due] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Whether what is queued is stored at full speed: once asked for, until nothing is.
        self._hurried = False
        self._closing = self._working = self._given_up = False
        self._commits_since: float | None = None  # `time.monotonic`
        self.busy: Callable[[], bool] = lambda: False
        self.dropped = 0

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the one that writes the queued records."""
        return threading.current_thread() is self._thread

    def put(self, label: PageLabel, size_bytes: int, fill: Fill) -> bool:
        """Queues a KV page or state to be stored by another thread, which calls `fill` to copy its bytes; returns
        whether it is queued: not if the queue is full or closed.
        """
        with self._changed:
            if self._closing or len(self._queue) >= MAX_WAITING:
                self.dropped += 1
                return False
            self._queue.append(_Due(label, size_bytes, fill))
            self._waiting_bytes += size_bytes
            if self._thread is None:
                self._thread = Daemon(self._run, name="kt-pages")
                self._thread.start()
            elif self._waiting_bytes >= self._target.batch_bytes:
                self._changed.notify_all()
            return True

    def hurry(self) -> None:
        """Makes the thread store all queued records at once, at full speed; does not wait for it."""
        with self._changed:
            self._hurried = not self._is_idle()
            self._changed.notify_all()

    def flush(self, wait_s: float) -> bool:
        """Has all queued records stored at full speed and waits for it, at most `wait_s` seconds; returns whether none
        is queued any more. Those that cannot be stored are dropped.
        """
        self.hurry()
        with self._changed:
            return self._changed.wait_for(self._is_idle, wait_s)

    @property
    def committing_s(self) -> float:
        """The seconds that storing the current file has taken so far; 0: no file is being stored."""
        since = self._commits_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, wait_s: float) -> None:
        """Stores queued records within `wait_s` seconds, drops the rest, and ends the thread that stores them."""
        self.flush(wait_s)
        with self._changed:
            self._closing = self._given_up = True
            self.dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _is_idle(self) -> bool:
        return self._thread is None or (not self._queue and not self._working)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            while batch := self._next():
                self._store(batch)
                with self._changed:
                    self._working = False
                    last = not self._queue
                    self._hurried = self._hurried and not last
                if last:
                    self._target.written()
                with self._changed:
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._closing, self._working = True, False
                self._queue.clear()
                self._changed.notify_all()

    def _next(self) -> list[_Due]:
        """The records of the next file; [] at the end."""
        with self._changed:
            self._changed.wait_for(self._has_batch)
            batch: list[_Due] = []
            size = 0
            while self._queue and size < self._target.batch_bytes:
                batch.append(self._queue.popleft())
                size += batch[-1].size_bytes
            self._waiting_bytes -= size
            self._working = bool(batch)
            return batch

    def _has_batch(self) -> bool:
        enough = self._waiting_bytes >= self._target.batch_bytes
        return enough or self._closing or (self._hurried and bool(self._queue))

    def _store(self, batch: list[_Due]) -> None:
        image = Image(self._target.space, [due.size_bytes for due in batch])
        wanted = self._target.wanted([due.label for due in batch])
        taken: set[tuple[int, bytes]] = set()
        for due, is_new in zip(batch, wanted, strict=True):
            name = due.label.kind, due.label.key
            if not is_new or name in taken:
                continue
            began = time.thread_time()
            if due.fill(image.place(due.label, due.size_bytes)):
                image.add(due.label, due.size_bytes)
                taken.add(name)
            self._rest(time.thread_time() - began)
        if not image.entries:
            return
        began = time.thread_time()
        while not self._commit(image):
            if self._given_up:
                self.dropped += len(image.entries)
                return
            time.sleep(_RETRY_S)
        self._rest(time.thread_time() - began)

    def _commit(self, image: Image) -> bool:
        self._commits_since = time.monotonic()
        try:
            return self._target.commit(image)
        finally:
            self._commits_since = None

    def _rest(self, worked_s: float) -> None:
        """Leaves the cores to the engine, as long as it is busy and nobody waits."""
        until = time.monotonic() + worked_s * (1 / BUSY_SHARE - 1)
        with self._changed:
            while not self._hurried and not self._closing and self.busy():
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _REST_S))
