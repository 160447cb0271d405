"""Records which requests a server gets, for `kt bench cache`: when, how long, and which blocks of prompts are the same.

Handlers only note a request and its end; a thread of its own hashes and writes. Lines come in the order of arrival, so
one is written when all before it have ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ktcli.errors import gib
from ktcli.measure.request_trace import TracedRequest
from ktcli.records import dataclass
from ktcli.server.process.tracefile import MOST_BYTES, BlockHasher, TraceFile
from ktcli.threads import Daemon

# Requests that wait for one before them, or to be hashed. Beyond that the first is written as if it had ended, so that
# an answer of hours holds nothing up; what cannot be hashed in time is left out.
MOST_WAITING = 1024
_CLOSE_S = 5.0


@dataclass(eq=False, slots=True)
class _Recorded:
    """A request that is written when it has ended.

    Attributes:
        arrived_ms: when it came, in the time of the trace.
        ids: the prompt; empty once it is hashed.
        answer: the tokens of its answers; None: it has not ended.
    """

    arrived_ms: int
    space: str
    ids: Sequence[int]
    length: int
    hash_ids: list[int] | None = None
    answer: int | None = None


class RequestRecorder:
    """Writes requests into a trace.

    Args:
        warn: called when recording ends early, with the reason.
    """

    def __init__(self, file: TraceFile, hasher: BlockHasher, warn: Callable[[str], None]) -> None:
        self._file, self._hasher, self._warn = file, hasher, warn
        self._began_s = time.monotonic()
        self._waiting: deque[_Recorded] = deque()
        self._unhashed: list[_Recorded] = []  # of these
        self._changed = threading.Condition()
        self._closing = False
        self._ended = False  # early
        self._thread = Daemon(self._run, name="kt-trace")
        self._thread.start()

    def begin(self, space: str, ids: Sequence[int]) -> Callable[[int], None]:
        """Records the arrival of a request; returns a function that records its end, given the tokens of its answers.
        Both cost next to nothing, on any thread.

        Args:
            space: whatever decides beside the ids who shares blocks, see `BlockHasher`.
        """
        with self._changed:
            passed_ms = 1e3 * (time.monotonic() - self._began_s)
            made = _Recorded(self._file.since_ms + int(passed_ms), space, ids, len(ids))
            if not (self._ended or self._closing) and len(self._waiting) < 2 * MOST_WAITING:
                self._waiting.append(made)
                self._unhashed.append(made)
                self._changed.notify()
        return partial(self._end, made)

    def _end(self, request: _Recorded, tokens: int) -> None:
        with self._changed:
            request.answer = tokens
            self._changed.notify()

    def close(self) -> None:
        """Writes all pending requests, unfinished ones as if they had ended, and closes the file."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    # --- on the recorder's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._unhashed or self._due()):
                    self._changed.wait()
                new, self._unhashed = self._unhashed, []
                due, last = self._due(), self._closing
            for each in new:
                each.hash_ids, each.ids = self._hasher.numbers(each.space, each.ids), ()
            if due:
                self._write(due)
            if last:
                self._file.close()
                return

    def _due(self) -> list[_Recorded]:
        """Returns the requests at the beginning that can be written."""
        found: list[_Recorded] = []
        for each in self._waiting:
            held_up = len(self._waiting) - len(found) > MOST_WAITING or self._closing
            if each.answer is None and not held_up:
                break
            found.append(each)
        return found

    def _write(self, due: Sequence[_Recorded]) -> None:
        lines = [
            TracedRequest(each.arrived_ms, each.length, each.answer or 0, each.hash_ids or [])
            for each in due
        ]
        said = ""
        try:
            if not self._file.append(lines):
                said = f"it has {gib(MOST_BYTES)}, the most that kt records"
        except OSError as error:
            said = str(error.strerror)
        with self._changed:
            for _ in due:
                self._waiting.popleft()
            if said:
                self._ended = True
                self._waiting.clear()
                self._unhashed.clear()
        if said:
            self._warn(f"requests are no longer recorded into {self._file.path}: {said}")
