"""The interface of whatever says which ids an answer may go on with; the engine knows nothing of grammars."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import KtError


class Constraint(Protocol):
    """What one answer may be, followed id by id; for the thread of the scheduler only.

    Drafted ids are tried against it one after the other, so that a draft never changes an answer.

    """

    @property
    def ready(self) -> bool:
        """Tells whether it is known; before that only the prompt can be read. Once it is, it stays so."""

    @property
    def error(self) -> KtError | None:
        """Why no id can follow any more, for reasons other than the answer; None: there is none."""

    @property
    def ended(self) -> bool:
        """Tells whether the answer is whole, and nothing but its end can follow."""

    def mask(self) -> NDArray[np.uint32]:
        """Bit i of word j: whether id 32 j + i may come next; it may change with the next call."""

    def take(self, id: int) -> None:
        """The answer goes on with an id."""
