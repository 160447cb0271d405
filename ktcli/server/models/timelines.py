"""Keeps the timelines of conversations between their answers, until another conversation sends a request.

What ends within a page is found again only on the timeline that computed it, and computing it once more would delay the
next answer. Pages of a timeline that is kept are nobody else's, so all are closed at the next request of another
conversation; whole pages are still found then.
"""

from __future__ import annotations

import contextlib

from ktcli.engine import Engine
from ktcli.engine.request import Answer
from ktcli.engine.sequence import Sequence
from ktcli.errors import KtError


class Timelines:
    """The timelines of an engine's conversations. Not for several threads at once; only `sweep` and `close` touch the
    engine, and are for its own thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[str, Sequence] = {}
        self._used: dict[Answer, tuple[str, Sequence]] = {}
        self._closing: list[Sequence] = []

    @property
    def due(self) -> bool:
        """Whether `sweep` has any timelines (cached sequences) to close."""
        return bool(self._closing)

    def take(self, conversation: str) -> Sequence | None:
        """Returns the timeline (the cached sequence) that a conversation continues, or a new one; the kept ones of all
        other conversations are left to `sweep`. None: `conversation` is empty, and nothing is kept for it."""
        found = self._kept.pop(conversation, None)
        self._closing += self._kept.values()
        self._kept.clear()
        if not conversation:
            return None
        return found or self._engine.sequence()

    def begin(self, answer: Answer, conversation: str, sequence: Sequence | None) -> None:
        """Records that an answer is computed on `sequence`, a timeline (cached sequence) that `take` returned; does
        nothing if that is None."""
        if sequence is not None:
            self._used[answer] = conversation, sequence

    def give_up(self, sequence: Sequence | None) -> None:
        """Records that no answer is computed on `sequence`, a timeline (cached sequence) that `take` returned, so that
        `sweep` closes it; does nothing if that is None."""
        if sequence is not None:
            self._closing.append(sequence)

    def end(self, answer: Answer, *, keep: bool) -> None:
        """Records that an answer has ended: its timeline (cached sequence) is kept for the conversation's next answer
        if `keep`, else `sweep` closes it."""
        conversation, sequence = self._used.pop(answer, ("", None))
        if sequence is None:
            return
        if keep:
            self._kept[conversation] = sequence
        else:
            self._closing.append(sequence)

    def sweep(self) -> None:
        """Closes the timelines (cached sequences of the engine) that no conversation continues."""
        closing, self._closing = self._closing, []
        for sequence in closing:
            with contextlib.suppress(KtError):  # of a device that failed
                sequence.close()

    def close(self) -> None:
        """Closes all timelines (cached sequences), those of answers in progress included."""
        self.take("")
        self._closing += [sequence for _, sequence in self._used.values()]
        self._used.clear()
        self.sweep()
