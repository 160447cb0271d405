"""The speed of a conversion, and the speed that each of its stages would reach alone.

Reading, encoding and writing overlap. The time in which a stage was busy, against the bytes of the checkpoint that went
through, is its ceiling: disk and cores each have one, and the lower one bounds the conversion.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from ktcli.records import dataclass


class Stopwatch:
    """The time during which at least one thread was busy.

    Attributes:
        seconds: seconds of work that is over.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._busy, self._since = 0, 0.0
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Opens a context in which the calling thread counts as busy: the stopwatch runs while any thread is in one."""
        with self._lock:
            if self._busy == 0:
                self._since = time.perf_counter()
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if self._busy == 0:
                    self.seconds += time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class Stages:
    """The times of the stages of one run of a conversion.

    Attributes:
        source_bytes: bytes read from the checkpoint in this run.
        threads: the number of threads that encoded.
        seconds: seconds from the first byte to the last.
        reading, encoding, writing: seconds in which that stage was busy. Encoding includes decoding, writing hashing.
    """

    source_bytes: int
    threads: int
    seconds: float
    reading: float
    encoding: float
    writing: float

    def rate(self, seconds: float) -> float:
        """Returns the rate, in bytes of the checkpoint per second, of a stage that was busy for `seconds`."""
        return self.source_bytes / max(seconds, 1e-9)

    @property
    def bound(self) -> str:
        """The name of the stage that was busy longest: "reading", "encoding" or "writing"."""
        names = "reading", "encoding", "writing"
        return max(names, key=lambda name: float(getattr(self, name)))
