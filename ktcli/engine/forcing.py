"""Forces an answer to known ids: from its first id on, or once it begins with the same ids."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class ForcedIds:
    """The ids that an answer must consist of; it ends behind them.

    Attributes:
        lead: how many of the first ids have to be chosen freely before the others are forced; an answer that begins
            otherwise stays free.
    """

    ids: tuple[int, ...]
    lead: int = 0


class Forcing:
    """The constraint of an answer whose ids are given in advance.

    Args:
        stop_ids: those that may come behind them.
    """

    def __init__(self, forced: ForcedIds, stop_ids: Collection[int]) -> None:
        self._forced, self._stop_ids = forced, tuple(stop_ids)
        self._said = 0  # ids of the answer, which are the first of the forced ones
        self._free = False

    def mask(self, vocab: int) -> NDArray[np.uint32] | None:
        """Returns the mask of the ids that may come next, see `Constraint.mask`; None: any may."""
        said, forced = self._said, self._forced
        if self._free or said < forced.lead:
            return None
        allowed = forced.ids[said : said + 1] or self._stop_ids
        mask = np.zeros(-(-vocab // 32), dtype=np.uint32)
        for id in allowed:
            if 0 <= id < vocab:
                mask[id // 32] |= np.uint32(1 << id % 32)
        return mask

    def take(self, id: int) -> None:
        """Advances by an id that was appended to the answer."""
        if self._forced.ids[self._said : self._said + 1] == (id,):
            self._said += 1
        else:
            self._free = True
