"""Computes the vector of a text for an embedding, from hidden rows that arrive in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.logits import F32Array, Logits
from ktcli.models.pooling import PoolingMode
from ktcli.records import dataclass

F64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The options of pooling: which hidden rows of a prompt count, and how they are combined.

    Attributes:
        since: the first position that counts; those of a prompt before the text may not.
    """

    mode: PoolingMode
    since: int = 0

    def needs_all(self, position: int) -> bool:
        """Returns whether pooling needs the hidden row of each token of a piece of the prompt that begins at
        `position`; else at most that of the prompt's last token, for `PoolingMode.LAST`.
        """
        return self.mode is PoolingMode.MEAN or (
            self.mode is PoolingMode.FIRST and position <= self.since
        )


@dataclass(eq=False, slots=True)
class Pooled:
    """The pooling of one prompt's hidden rows, in progress.

    A mean is summed in f64, row after row, so that its bits do not depend on the pieces in which rows come. Rows that
    were computed again, since their pages were given back, count once.
    """

    rows: PooledRows
    _next: int = field(init=False)
    _count: int = 0
    _sum: F64Array | None = None

    def __post_init__(self) -> None:
        self._next = self.rows.since

    def take(self, position: int, rows: Sequence[Logits]) -> None:
        """Adds the hidden rows of the prompt's tokens from `position` on, one for each token; rows that were added
        before, or that lie before the first that counts, are skipped.
        """
        for row in rows[max(0, self._next - position) :]:
            self._take(row.values)
        self._next = max(self._next, position + len(rows))

    def _take(self, row: F32Array) -> None:
        if self._sum is None or self.rows.mode is PoolingMode.LAST:
            self._sum, self._count = row.astype(np.float64), 1
        elif self.rows.mode is PoolingMode.MEAN:
            self._sum += row
            self._count += 1

    @property
    def vector(self) -> F64Array | None:
        """The vector that was pooled from the rows so far, f64 [hidden]; None: no row was added."""
        return None if self._sum is None else self._sum / self._count
