"""The interface of constraints, which determine the allowed next ids of an answer; the engine does not know about
grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError


class Constraint(Protocol):
    """The interface of a constraint on one answer: says which ids may come next, id by id; for the scheduler's thread
    only.

    Drafted ids are tried against it one after the other, so that a draft never changes an answer.
    """

    @property
    def ready(self) -> bool:
        """Whether the constraint is known; before that only the prompt can be read. Once it is, it stays so."""

    @property
    def error(self) -> KtError | None:
        """The reason, other than the answer itself, why no id can follow any more; None: there is none."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing but its end can follow."""

    def mask(self) -> NDArray[np.uint32]:
        """Returns the mask of the ids that may come next: bit i of word j is id 32 j + i; it may change with the
        next call."""

    def take(self, id: int) -> None:
        """Advances by an id that was appended to the answer."""
