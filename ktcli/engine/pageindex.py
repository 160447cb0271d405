"""Finds the sealed page that shares the longest beginning with given ids, after a known prefix.

Keys find whole pages, or parts of pages of exactly these ids. What a conversation has computed of its last page, or
shares of a page with another that goes on differently, is found here.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.prefix import Depths, Ids
from ktcli.pagelabel import PageLabel

_COMPARED = 32  # the pages sealed last that begin with the same id: more would let one prompt cost as much as it likes


class CommonBeginning(NamedTuple):
    """A page of which the first `tokens` ids are equal to those looked up, and were computed in the same way."""

    page: int
    tokens: int


class PageIndex:
    """Sealed pages, by the key of the prefix before them and by their first id."""

    def __init__(self) -> None:
        self._pages: dict[tuple[bytes, int], OrderedDict[int, NDArray[np.int64]]] = {}
        self._places: dict[int, tuple[bytes, int]] = {}

    def add(self, page: int, label: PageLabel) -> None:
        """Adds a page that has just been sealed to the index, under the prefix and the ids of its label."""
        content = _content(label.ids, label.depths)
        place = label.previous, int(content[0])
        self._pages.setdefault(place, OrderedDict())[page] = content
        self._places[page] = place

    def remove(self, page: int) -> None:
        """Removes a page from the index, if it is there."""
        place = self._places.pop(page, None)
        if place is not None:
            del self._pages[place][page]
            if not self._pages[place]:
                del self._pages[place]

    def clear(self) -> None:
        """Removes all pages from the index."""
        self._pages.clear()
        self._places.clear()

    def longest(self, previous: bytes, ids: Ids, depths: Depths) -> CommonBeginning | None:
        """Returns the page that follows the prefix with the key `previous` and has the most leading ids in common with
        `ids`, and the number of these ids; of several such pages, the one sealed last. Of pages with the same first id
        only the 32 sealed last are compared. None: no page has even the first id in common.

        Args:
            ids: [n], at least 1.
            depths: how each is to be computed, [n], see `forms`.
        """
        wanted = _content(ids, depths)
        best = None
        pages = self._pages.get((previous, int(wanted[0])), OrderedDict())
        for page, own in islice(reversed(pages.items()), _COMPARED):
            n = min(wanted.size, own.size)
            different = np.flatnonzero(own[:n] != wanted[:n])
            tokens = int(different[0]) if different.size else n
            if best is None or tokens > best.tokens:
                best = CommonBeginning(page, tokens)
        return best


def _content(ids: Ids, depths: Depths) -> NDArray[np.int64]:
    """What is compared of each id: the id, and how it is computed."""
    content: NDArray[np.int64] = ids.astype(np.int64) << 8 | depths
    return content
