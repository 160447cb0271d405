"""Sources of drafted tokens: guesses of the next tokens, made without the model, for a step that checks several at
once.

A source knows nothing of the model. `Lookup` finds the latest place where the conversation's last ids stood before, and
drafts what followed there: code that is edited, quotes and tables repeat themselves. Drafts of a model's own heads
would be another source. Whether a draft is worth its rows is decided elsewhere (draft_length.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ktcli.records import dataclass

# Ids of the n-grams that are looked up, the longest first: a place that agrees in more of them is a better guess.
GRAMS = (20, 12, 8, 5, 3)
# The latest positions that are remembered: each has one entry of about 100 bytes per length.
WINDOW = 32_768

# A polynomial in the ids, kept as a rolling sum; what it finds is compared id by id.
_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_OUT = {n: pow(_BASE, n, 1 << 64) for n in GRAMS}


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted ids: a guess of those that follow.

    Attributes:
        ids: the ids that may follow; (): there is no guess.
        kind: which of the source's kinds of guesses it is; guesses of a kind are right about equally often.
    """

    ids: tuple[int, ...] = ()
    kind: int = 0


class DraftSource(Protocol):
    """The interface of a source of drafts of the ids that may follow in a conversation."""

    @property
    def kinds(self) -> tuple[float, ...]:
        """The assumed probability that a drafted id is right, one for each kind of guess that the source makes; used
        until enough guesses were counted.
        """

    def follow(self, ids: Sequence[int]) -> None:
        """Sets the token ids of the conversation; cheap if they begin with those set before."""

    def extend(self, id: int) -> None:
        """Appends one token id to the conversation."""

    def draft(self, most: int) -> Draft:
        """Returns a guess of at most `most` token ids that may follow in the conversation, with the kind of guess; its
        `ids` are () if there is no guess.
        """


class Lookup:
    """Drafts the ids that followed the latest earlier occurrence of the conversation's last ids.

    Beside the ids, memory is bounded by the window, and an id costs the same however long the conversation is.

    Args:
        window: the latest positions that are remembered.
    """

    # The shares that were right over code, JSON and prose of this tree (benchmarks/drafting.py, 32,667 tokens).
    kinds = (0.94, 0.82, 0.74, 0.69, 0.48)

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._sums = dict.fromkeys(GRAMS, 0)
        # For each length: the sum of an n-gram → where it last ended, and what is forgotten next.
        self._ends: dict[int, dict[int, int]] = {n: {} for n in GRAMS}
        self._order: dict[int, deque[int]] = {n: deque() for n in GRAMS}

    def follow(self, ids: Sequence[int]) -> None:
        """Sets the token ids of the conversation; if they begin with those set before, only the rest is added."""
        known = len(self._ids)
        if known > len(ids) or self._ids != list(ids[:known]):
            self._clear()
            known = 0
        for id in ids[known:]:
            self.extend(int(id))

    def draft(self, most: int) -> Draft:
        """Returns the `most` ids that followed the latest earlier occurrence of the conversation's last n ids, repeated
        if fewer followed; n is the greatest of GRAMS for which there is one. `ids` of the result is () if there is
        none.
        """
        length = len(self._ids)
        for kind, n in enumerate(GRAMS):
            if length <= n:
                continue
            end = self._ends[n].get(self._sums[n])
            if end is not None and self._ids[end - n : end] == self._ids[length - n :]:
                return Draft(self._after(end, most), kind)
        return Draft()

    def _after(self, end: int, most: int) -> tuple[int, ...]:
        """What followed the place that ends before `end`; where that reaches the present, it repeats itself."""
        period = len(self._ids) - end
        return tuple(self._ids[end + i % period] for i in range(most))

    def extend(self, id: int) -> None:
        """Appends one token id to the conversation; the n-grams that ended before it can be found from now on."""
        ids, end = self._ids, len(self._ids)
        for n in GRAMS:
            if end >= n:
                self._remember(n, end)
            out = ids[end - n] if end >= n else -1
            self._sums[n] = (self._sums[n] * _BASE + id + 1 - (out + 1) * _OUT[n]) & _MASK
        ids.append(id)

    def _remember(self, n: int, end: int) -> None:
        ends, order, sum_ = self._ends[n], self._order[n], self._sums[n]
        ends[sum_] = end
        order.append(sum_)
        if len(order) > self._window:
            oldest = order.popleft()
            if ends.get(oldest) == end - self._window:
                del ends[oldest]
