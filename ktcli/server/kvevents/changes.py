"""Collects what comes to an engine's memory and its disk and goes from there, until somebody takes it.

The engine's thread and those of stores put changes in; neither waits for anything. Of a page that came and went
meanwhile only the last change is kept, so that there are never many more of them than pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from ktcli.native import PAGE_TOKENS
from ktcli.pagelabel import PageKind, PageLabel
from ktcli.records import dataclass
from ktcli.store.pagefile import PageEntry

DISK = "DISK"
_MOST = 1 << 18  # changes that wait; each takes some 700 bytes of memory


class StoredPage(NamedTuple):
    """A page that is in a file."""

    path: Path
    entry: PageEntry


class PagePlace(NamedTuple):
    """A page, by its key, in a medium."""

    medium: str
    key: bytes


Came = PageLabel | StoredPage


@dataclass(frozen=True, slots=True)
class PageChangeSet:
    """The changes of some time.

    Attributes:
        begins: whether a model was opened or closed since the last time, and none of the pages before is there.
        root: the key of the empty prefix of those who name no salt and no adapter; None: no model is open.
        lost: whether some changes were dropped, since nobody took them.
        pages: what came, or None for what went, in the order of the last change.
    """

    begins: bool = False
    root: bytes | None = None
    lost: bool = False
    pages: dict[PagePlace, Came | None] = field(default_factory=dict)


class PageChanges:
    """The queue of changes of the findable pages; observes the pages of one engine at a time.

    Args:
        wake: called by whatever thread when there is something, after there was nothing.
        most: the most changes that wait.
    """

    def __init__(self, wake: Callable[[], object], most: int = _MOST) -> None:
        self._wake, self._most = wake, most
        self._guard = threading.Lock()
        self._root: bytes | None = None
        self._medium = ""
        self._begins = self._lost = False
        self._pages: dict[PagePlace, Came | None] = {}

    def begins(self, root: bytes, medium: str) -> None:
        """Records that a model was opened, so that none of the earlier KV pages can be found.

        Args:
            root: the key of the empty prefix for requests without salt and adapter.
            medium: where its memory is: GPU or CPU.
        """
        self._restart(root, medium)

    def ends(self) -> None:
        """Records that the model is closed, so that none of its pages can be found."""
        self._restart(None, "")

    def came(self, label: PageLabel) -> None:
        """Records that a KV page can be found in memory; one that is not full is ignored."""
        if label.ids.size == PAGE_TOKENS:
            self._put(PagePlace(self._medium, label.key), label)

    def went(self, key: bytes) -> None:
        """Records that the KV page with this key cannot be found in memory any more."""
        self._put(PagePlace(self._medium, key), None)

    def stored(self, path: Path, entries: Sequence[PageEntry]) -> None:
        """Records that KV pages can be found in the file at `path`; those that are not full are ignored."""
        for entry in entries:
            if entry.kind == PageKind.PAGE and entry.n_ids == PAGE_TOKENS:
                self._put(PagePlace(DISK, entry.key), StoredPage(path, entry))

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Records that KV pages cannot be found in files on disk any more."""
        for entry in entries:
            if entry.kind == PageKind.PAGE:
                self._put(PagePlace(DISK, entry.key), None)

    def take(self) -> PageChangeSet:
        """Returns the changes of KV pages since the last call, and empties the queue."""
        with self._guard:
            taken = PageChangeSet(self._begins, self._root, self._lost, self._pages)
            self._begins = self._lost = False
            self._pages = {}
        return taken

    def _put(self, place: PagePlace, change: Came | None) -> None:
        with self._guard:
            is_first = not self._pages
            if self._root is None:
                return
            if len(self._pages) >= self._most:
                self._pages.clear()
                self._lost = True
            self._pages.pop(place, None)  # the last change counts, and comes last
            self._pages[place] = change
        if is_first:
            self._wake()

    def _restart(self, root: bytes | None, medium: str) -> None:
        with self._guard:
            self._root, self._medium = root, medium
            self._begins, self._lost = True, False
            self._pages = {}
        self._wake()
