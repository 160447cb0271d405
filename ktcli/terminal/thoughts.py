"""Folds a model's thoughts into one line: that it is thinking, for how long, and in how many tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

_EVERY_S = 0.1  # between two drawings of the line


class ThoughtsView(Enum):
    """The ways in which thoughts are displayed."""

    FOLDED = "folded"
    SHOWN = "shown"
    HIDDEN = "hidden"


class ThoughtsLine:
    """The line that represents the thoughts of an answer, redrawn while they last.

    Args:
        draw: draws the line anew, over what it was; called at most ten times a second.
        tokens: returns the tokens of the answer so far.
    """

    def __init__(
        self,
        draw: Callable[[str], None],
        tokens: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw, self._tokens, self._clock = draw, tokens, clock
        self._began_s, self._drawn_s = clock(), 0.0
        self._first = tokens()
        self._empty = True

    def feed(self, text: str) -> None:
        """Adds a piece of the thoughts, and redraws the line if that is due."""
        self._empty = self._empty and not text.strip()
        now = self._clock()
        if not self._empty and now - self._drawn_s >= _EVERY_S:
            self._drawn_s = now
            self._draw(f"▸ thinking, {self._words}")

    def finish(self, *, cut: bool) -> str:
        """Returns the final line; empty: there was no thought.

        Args:
            cut: whether it was ended because it had spent its budget.
        """
        end = ", then cut" if cut else ""
        return "" if self._empty else f"▸ thought for {self._words}{end}"

    @property
    def _words(self) -> str:
        tokens = max(1, self._tokens() - self._first)
        return (
            f"{_span(self._clock() - self._began_s)}, {tokens:,} token{'s' if tokens > 1 else ''}"
        )


def _span(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
