"""The interface of constraints, which determine the allowed next ids of an answer, and that by known ids: from the
answer's first id on, or once it begins with the same ids. The engine does not know about grammars."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError
from ktcli.records import dataclass


def mask_of(ids: Collection[int], vocab: int) -> NDArray[np.uint32]:
    """Returns a bit mask over the vocabulary, uint32 [vocab / 32, rounded up]: bit i of word j is 1 if id 32 j + i is
    one of `ids`. Ids outside the vocabulary are left out.
    """
    mask = np.zeros(-(-vocab // 32), dtype=np.uint32)
    for id in ids:
        if 0 <= id < vocab:
            mask[id // 32] |= np.uint32(1 << id % 32)
    return mask


class Constraint(Protocol):
    """The interface of a constraint on one answer: says which ids may come next, id by id; for the scheduler's thread
    only.

    Drafted ids are tried against it one after the other, so that a draft never changes an answer.
    """

    @property
    def ready(self) -> bool:
        """Whether the constraint can be applied already; until then only the prompt can be computed. Once true, it
        stays true.
        """

    @property
    def error(self) -> KtError | None:
        """The error that keeps any further id from following, not due to the answer itself; None: there is none."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete under the constraint, so that only its end can follow."""

    def mask(self) -> NDArray[np.uint32]:
        """Returns the bit mask of the ids that the constraint allows next: bit i of word j is 1 if id 32 j + i is
        allowed, see `mask_of`. The next call may overwrite the array.
        """

    def take(self, id: int) -> None:
        """Advances the constraint's state by an id that was appended to the answer."""


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
        """Returns the bit mask (see `mask_of`) of the ids that may come next: the next forced id or, after the last
        forced one, the stop ids. None: any id may come.
        """
        said, forced = self._said, self._forced
        if self._free or said < forced.lead:
            return None
        return mask_of(forced.ids[said : said + 1] or self._stop_ids, vocab)

    def take(self, id: int) -> None:
        """Advances the constraint's state by an id that was appended to the answer; an id that is not the next forced
        one ends the forcing.
        """
        if self._forced.ids[self._said : self._said + 1] == (id,):
            self._said += 1
        else:
            self._free = True
