"""The pages of one sequence, and the keys of its prefixes under which full ones are sealed and found by others."""

from __future__ import annotations

from dataclasses import replace

from ktcli.engine.pages import PoolFull
from ktcli.engine.pagetable import PageTable, pages_for
from ktcli.engine.pools import KnownPrefix, Pools
from ktcli.engine.prefix import Content
from ktcli.native import PAGE_TOKENS
from ktcli.pagelabel import PageKind, PageLabel


class OwnPages:
    """The pages of one sequence: those of all its positions, and those of the layers with a window.

    Args:
        content: the ids of the sequence and how each was computed, which the sequence fills.
    Attributes:
        keys: the keys of the full pages.
        table: the pages of all positions.
        windows: those of the layers with a window; None: they have none of their own.
    """

    def __init__(self, pools: Pools, content: Content) -> None:
        self._pools, self.content = pools, content
        self.keys: list[bytes] = []
        self.table = PageTable(pools.pages, pools.copy, pools.context)
        self.windows: PageTable | None = None
        if (windows := pools.windows) is not None:
            self.windows = PageTable(windows.pool, windows.copy, pools.context, windows)

    @property
    def _tables(self) -> tuple[PageTable, ...]:
        return (self.table,) if self.windows is None else (self.table, self.windows)

    # -- steps -----------------------------------------------------------------------------------------

    def reserve(self, length: int, end: int) -> None:
        """Takes pages up to position `end`, and makes those that `length` lies in, if they are begun, its own.

        Raises:
            PoolFull: others hold the pages; nothing was taken.
        """
        self.table.reserve(length, end)
        if self.windows is None:
            return
        try:
            self.windows.reserve(length, end)
        except PoolFull:
            self.table.cut(length, self.keys)
            raise

    def seal(self, length: int) -> None:
        """Seals the pages that are full now. Where another page has the same key both stay: what this sequence
        computed is what it goes on with."""
        for at in range(len(self.keys), length // PAGE_TOKENS):
            label = self.label(PageKind.PAGE, at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
            self.keys.append(label.key)
            self._seal(at, label)

    def seal_open(self, length: int) -> None:
        """Seals the last page, if it is not full: whoever goes on from there copies it."""
        if rest := length % PAGE_TOKENS:
            label = self.label(PageKind.PAGE, length - rest, length)
            self._seal(length // PAGE_TOKENS, label)
            if self.windows is not None:
                self.windows.favour([label.key])

    def _seal(self, at: int, label: PageLabel) -> None:
        """Seals page `at` of each kind, unless others have the key."""
        kinds = [(PageKind.PAGE, self._pools.pages, self.table)]
        if self.windows is not None and self._pools.windows is not None:
            kinds.append((PageKind.WINDOW, self._pools.windows.pool, self.windows))
        for kind, pool, table in kinds:
            page = int(table.numbers[at])
            indexed = label if kind == PageKind.PAGE else None
            if pool.sealed(page) or not pool.seal(page, label.key, indexed):
                continue
            if self._pools.tier is not None:
                self._pools.tier.sealed(page, replace(label, kind=kind))

    def pass_by(self, length: int) -> None:
        """Releases the pages that a window at `length` does not reach any more."""
        if self.windows is not None:
            self.windows.pass_by(length)

    def favour(self, position: int) -> None:
        """Makes the pages of the window before a position be evicted after others: reuse is likely to begin there."""
        if self.windows is not None:
            self.windows.favour(self.keys[self.windows.needed(position) :])

    # -- keys ------------------------------------------------------------------------------------------

    def label(self, kind: PageKind, first: int, end: int) -> PageLabel:
        """Returns the label of what ends with the ids of positions first … end - 1, the full pages before them."""
        return self.content.label(kind, self.key_before(first), first, end)

    def labels(self) -> list[PageLabel]:
        """Returns the labels of the full pages."""
        starts = range(0, len(self.keys) * PAGE_TOKENS, PAGE_TOKENS)
        return [self.label(PageKind.PAGE, first, first + PAGE_TOKENS) for first in starts]

    def key_before(self, position: int) -> bytes:
        """Returns the key of the full pages before a position."""
        full = position // PAGE_TOKENS
        return self.keys[full - 1] if full else self.content.root

    # -- going elsewhere -------------------------------------------------------------------------------

    def reachable(self, position: int) -> int:
        """Returns the last position up to `position` whose pages of the window are held or can be found."""
        return position if self.windows is None else self.windows.reachable(position, self.keys)

    def cut(self, length: int) -> None:
        """Keeps the first `length` positions; the last pages go first, so that they are evicted first."""
        for table in self._tables:
            table.cut(length, self.keys)
        del self.keys[length // PAGE_TOKENS :]

    def share(self, other: OwnPages, length: int) -> None:
        """Adds references to the pages of another sequence's first `length` positions; this one must have none."""
        self.keys = list(other.keys)
        self.content = replace(self.content, root=other.content.root)
        for table, others in zip(self._tables, other._tables, strict=True):
            table.share(others)
            table.cut(length, self.keys)  # without what a step that failed has taken

    def become(self, known: KnownPrefix) -> None:
        """Becomes the pages of a prefix that the pools know, for which references were taken already, see
        `Pools.hold`; there must be none."""
        self.table.become(0, known.pages)
        if self.windows is not None:
            first = pages_for(known.length) - len(known.windows)
            self.windows.become(first, known.windows)
        self.keys = known.keys
