"""The logits of the next token, and a summary of every block of them.

A vocabulary has up to 200,000 entries and almost all of them are hopeless. The summary tells which: the program makes
it while the logits are still in the caches (kt_program_summary in kt.h), `Logits.of` makes the same for other scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.native import BLOCK_COLUMNS

F32Array = NDArray[np.float32]


class Logits(NamedTuple):
    """One row of logits, V values in B blocks of 64, of which the last may be shorter.

    Attributes:
        values: the logits [V].
        best: id of the greatest value, the first of equals; if any value is NaN or +infinity, of such a one.
        peaks: the greatest value of each block, [B].
        sums: the sum of e^((value - peak) / temperature) over each block, [B].
        temperature: the temperature of the sums; 0: they were not made.
    """

    values: F32Array
    best: int
    peaks: F32Array
    sums: F32Array
    temperature: float

    @classmethod
    def of(cls, values: F32Array, temperature: float = 0.0) -> Logits:
        """Returns a row of logits [V] together with its summary, computed here: the id of the greatest logit and, for
        each block of 64 logits, the greatest one and, unless `temperature` is 0, the sum of exponentials.
        """
        rows = np.full((-(-len(values) // BLOCK_COLUMNS), BLOCK_COLUMNS), -np.inf, np.float32)
        rows.reshape(-1)[: len(values)] = values
        peaks: F32Array = rows.max(axis=1)
        sums = np.zeros_like(peaks)
        if temperature:
            base = np.where(np.isfinite(peaks), peaks, 0)  # the sum of a masked block is 0
            sums = np.exp((rows - base[:, None]) / np.float32(temperature)).sum(axis=1)
        block = int(peaks.argmax())
        best = block * BLOCK_COLUMNS + int(rows[block].argmax())
        return cls(values, best, peaks, sums, temperature)

    def copied(self) -> Logits:
        """Returns the same logits with arrays of their own, which later steps do not overwrite."""
        arrays = {name: getattr(self, name).copy() for name in ("values", "peaks", "sums")}
        return self._replace(**arrays)
