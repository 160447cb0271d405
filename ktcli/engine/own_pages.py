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
        """Allocates KV-cache pages for the sequence up to position `end`; a partly filled page at position `length`
        that others may read is replaced by a copy.

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
        """Gives each full page of the first `length` positions its content address, by which other sequences find it,
        unless it has one. If another page has the same address already, this sequence still keeps its own page.
        """
        for at in range(len(self.keys), length // PAGE_TOKENS):
            label = self.label(PageKind.PAGE, at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
            self.keys.append(label.key)
            self._seal(at, label)

    def seal_open(self, length: int) -> None:
        """Gives the last page of the sequence's `length` positions a content address, if it is not full, so that others
        can copy it and go on from there.
        """
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
        """Releases the pages of the sliding-window layers that a token at position `length`, or up to MOST_DRAFTED
        positions before, does not see any more.
        """
        if self.windows is not None:
            self.windows.pass_by(length)

    def favour(self, position: int) -> None:
        """Lets the sliding-window layers' pages that a token at `position` reads be evicted only after others, since
        reuse is likely to begin there.
        """
        if self.windows is not None:
            self.windows.favour(self.keys[self.windows.needed(position) :])

    # -- keys ------------------------------------------------------------------------------------------

    def label(self, kind: PageKind, first: int, end: int) -> PageLabel:
        """Returns the label (content address, ids and how each was computed) of the page or state that ends with the
        ids of positions first … end - 1; only full pages come before them.
        """
        return self.content.label(kind, self.key_before(first), first, end)

    def labels(self) -> list[PageLabel]:
        """Returns the labels (content address, ids, how each was computed) of the sequence's full pages, in order."""
        starts = range(0, len(self.keys) * PAGE_TOKENS, PAGE_TOKENS)
        return [self.label(PageKind.PAGE, first, first + PAGE_TOKENS) for first in starts]

    def key_before(self, position: int) -> bytes:
        """Returns the content address of the last full page before a position, a hash of all ids up to its end; before
        the first full page, the key of the empty prefix.
        """
        full = position // PAGE_TOKENS
        return self.keys[full - 1] if full else self.content.root

    # -- going elsewhere -------------------------------------------------------------------------------

    def reachable(self, position: int) -> int:
        """Returns the last position, up to `position`, at which the sequence could continue: the pages that its
        sliding-window layers read there are held or can be found in the pool.
        """
        return position if self.windows is None else self.windows.reachable(position, self.keys)

    def cut(self, length: int) -> None:
        """Releases all pages after the sequence's first `length` positions, the last ones first, so that they are
        evicted first.
        """
        for table in self._tables:
            table.cut(length, self.keys)
        del self.keys[length // PAGE_TOKENS :]

    def share(self, other: OwnPages, length: int) -> None:
        """Makes this sequence, which must have no pages, hold those of another sequence's first `length` positions,
        too, with a reference of its own to each.
        """
        self.keys = list(other.keys)
        self.content = replace(self.content, root=other.content.root)
        for table, others in zip(self._tables, other._tables, strict=True):
            table.share(others)
            table.cut(length, self.keys)  # without what a step that failed has taken

    def become(self, known: KnownPrefix) -> None:
        """Gives this sequence, which must have no pages, those of a cached prefix; references to them were taken
        already, see `Pools.hold`.
        """
        self.table.become(0, known.pages)
        if self.windows is not None:
            first = pages_for(known.length) - len(known.windows)
            self.windows.become(first, known.windows)
        self.keys = known.keys
