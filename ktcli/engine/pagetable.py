"""The pages of one kind that one sequence holds.

Layers that attend to everything keep every page of a sequence. Layers with a window keep those that the next token
still reaches; pages behind the window are given up as the sequence goes on. Being full, they are sealed and can be
found again as long as nobody needs their place.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Numbers
from typing import Protocol

import numpy as np

from ktcli.engine.pages import PagePool, PoolFull
from ktcli.native import PAGE_TOKENS
from ktcli.pagelabel import U8Array
from ktcli.planner.memory import MOST_DRAFTED, window_pages
from ktcli.records import dataclass

_NONE = -1  # in a table: no page is held there


def pages_for(positions: int) -> int:
    """Returns the number of KV-cache pages, of 64 positions each, that hold `positions` positions."""
    return -(-positions // PAGE_TOKENS)


class PagedMemory(Protocol):
    """The interface of the memory of the pages of one kind."""

    @property
    def page_bytes(self) -> int:
        """The number of bytes that one KV-cache page in this memory takes in a store."""

    def saved_page(self, page: int) -> U8Array:
        """Returns the bytes of the KV-cache page with this number as they are stored; any thread may ask for a sealed
        page, which is not written any more.

        Raises:
            DeviceError: the device that has them failed.
        """

    def page_room(self, page: int) -> U8Array:
        """Returns a buffer into which a stored KV-cache page is read; `restore_page` then copies it into the page with
        this number.
        """

    def restore_page(self, page: int, room: U8Array) -> None:
        """Copies the bytes that were read into `room`, as `page_room` returned it, into the KV-cache page with this
        number.
        """


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pool and memory of window pages: those of the layers with a sliding window.

    Attributes:
        pool: who has which.
        copy: copies the contents of a page to another: (from, to).
        window: the positions that a token sees in the widest of them, its own included.
        memory: where they lie.
    """

    pool: PagePool
    copy: Callable[[int, int], None]
    window: int
    memory: PagedMemory | None = None

    def first(self, position: int) -> int:
        """Returns the index, in the sequence, of the first page that a token at `position` sees through the sliding
        window.
        """
        return max(0, position + 1 - self.window) // PAGE_TOKENS

    def most(self, end: int) -> int:
        """Returns the most pages of the sliding-window layers that a sequence of up to `end` positions holds at once,
        not counting those of a prompt's chunk.
        """
        return min(pages_for(end), window_pages(self.window))


class PageTable:
    """The pages of one kind that a sequence holds: those of the positions in pages first … end - 1.

    Args:
        context: the most positions of a sequence.
        windows: the window that it keeps; None: all pages.
    Attributes:
        first, end: the pages of the sequence that are held.
        numbers: the pool's page of each page of the sequence, int32.
    """

    def __init__(
        self,
        pool: PagePool,
        copy: Callable[[int, int], None],
        context: int,
        windows: WindowPages | None = None,
    ) -> None:
        self._pool, self._copy, self._windows = pool, copy, windows
        self.numbers = np.full(pages_for(context), _NONE, dtype=np.int32)
        self.first = self.end = 0

    @property
    def held(self) -> tuple[int, ...]:
        """The pool's numbers of the pages that the sequence holds, in the order of their positions."""
        return tuple(self.numbers[self.first : self.end].tolist())

    def needed(self, position: int) -> int:
        """Returns the index, in the sequence, of the first page that a token at `position` reads: 0, unless only the
        pages of a sliding window are kept.
        """
        return 0 if self._windows is None else self._windows.first(position)

    # -- steps -----------------------------------------------------------------------------------------

    def reserve(self, length: int, end: int) -> None:
        """Allocates pages of the sequence up to position `end`; a partly filled page at position `length` that is
        sealed or held by others, too, is replaced by a copy. If there is no room for the copy and nobody else holds the
        page, it loses its content address instead.

        Raises:
            PoolFull: others hold the pages; nothing was taken.
        """
        pool, at = self._pool, length // PAGE_TOKENS
        last = int(self.numbers[at]) if length % PAGE_TOKENS else _NONE
        shared = last >= 0 and (pool.sealed(last) or pool.holders(last) > 1)
        more = max(0, pages_for(end) - self.end)
        if not (more or shared):
            return
        try:
            taken = pool.take(more + shared)
        except PoolFull:
            if not shared or pool.holders(last) > 1:
                raise
            taken = pool.take(more)
            pool.unseal(last)  # nobody else holds it, and there is no room for both
            shared = False
        if shared:
            fresh = taken.pop()
            self._copy(last, fresh)
            pool.release(last)
            self.numbers[at] = fresh
        self.numbers[self.end : self.end + more] = taken
        self.end += more

    def pass_by(self, length: int) -> None:
        """Releases the pages that a token at position `length`, or up to MOST_DRAFTED positions before, does not read
        any more; without a sliding window there are none.
        """
        first = min(self.needed(length - MOST_DRAFTED), self.end)
        for page in self.numbers[self.first : first].tolist():
            self._pool.release(page)
        self.numbers[self.first : first] = _NONE
        self.first = max(self.first, first)

    def favour(self, keys: Numbers[bytes]) -> None:
        """Lets the pages with these content addresses be evicted only after others, since reuse is likely to begin
        there.
        """
        for key in keys:
            self._pool.favour(key)

    # -- going elsewhere -------------------------------------------------------------------------------

    def reachable(self, position: int, keys: Numbers[bytes]) -> int:
        """Returns the last position, at most `position`, at which the sequence could continue, since all earlier pages
        that a token there reads are held or can be found in the pool; 0: only from the start.

        Args:
            keys: the content addresses of the full pages of the sequence.
        """
        while position:
            missing = next(
                (
                    at
                    for at in reversed(range(self.needed(position), pages_for(position)))
                    if not self.first <= at < self.end
                    and (at >= len(keys) or self._pool.page_of(keys[at]) is None)
                ),
                None,
            )
            if missing is None:
                return position
            position = missing * PAGE_TOKENS
        return 0

    def cut(self, length: int, keys: Numbers[bytes]) -> None:
        """Releases all pages after the sequence's first `length` positions, the last ones first, so that they are
        evicted first; pages that a window reads at `length`, and were released before, are held again. `length` must be
        `reachable`.
        """
        first, end = self.needed(length), pages_for(length)
        back = range(first, min(self.first, end))
        for at in back:
            page = self._pool.find(keys[at])
            assert page is not None
            self._pool.hold(page)
            self.numbers[at] = page
        for page in self.numbers[max(end, self.first) : self.end][::-1].tolist():
            self._pool.release(page)
        self.numbers[max(end, self.first) : self.end] = _NONE
        self.first, self.end = min(self.first, first), min(self.end, end)
        self.first = min(self.first, self.end)

    def share(self, other: PageTable) -> None:
        """Makes this table, which must be empty, hold all pages of another one, too, with a reference of its own to
        each.
        """
        for page in other.held:
            self._pool.hold(page)
        self.numbers[other.first : other.end] = other.numbers[other.first : other.end]
        self.first, self.end = other.first, other.end

    def become(self, first: int, pages: Numbers[int]) -> None:
        """Makes `pages`, the numbers of pages in the pool to which references were taken already, the pages of the
        sequence from its page `first` on. The table must be empty.
        """
        self.first, self.end = first, first + len(pages)
        self.numbers[self.first : self.end] = pages
