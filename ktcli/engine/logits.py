"""The scores of the next token, and a summary of every block of them.

A vocabulary has up to 200,000 entries and almost all of them are hopeless. The summary tells which: the program makes
it while the logits are still in the caches (kt_program_summary in kt.h), `Logits.of` makes the same for other scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.native import BLOCK_COLUMNS

F32Array = NDArray[np.float32]
Ids = NDArray[np.int64]

_INSIDE = np.arange(BLOCK_COLUMNS)


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
        """Returns logits with their summary, which is computed here."""
        blocks = -(-len(values) // BLOCK_COLUMNS)
        peaks, sums = _summary(values, np.arange(blocks), temperature)
        return cls(values, _best(values, peaks), peaks, sums, temperature)

    def with_values(self, ids: Ids, values: F32Array) -> Logits:
        """Returns the logits with other values at `ids`; an id that comes twice has the same value twice."""
        changed, peaks, sums = self.values.copy(), self.peaks.copy(), self.sums.copy()
        changed[ids] = values
        blocks = np.flatnonzero(np.bincount(ids // BLOCK_COLUMNS))
        peaks[blocks], sums[blocks] = _summary(changed, blocks, self.temperature)
        return Logits(changed, _best(changed, peaks), peaks, sums, self.temperature)

    def at_temperature(self, temperature: float) -> Logits:
        """Returns the same logits with their sums computed at this temperature."""
        return self if temperature == self.temperature else Logits.of(self.values, temperature)

    def ids_in(self, blocks: Ids) -> Ids:
        """Returns the token ids in these blocks; both ascending."""
        ids: Ids = (blocks[:, None] * BLOCK_COLUMNS + _INSIDE).ravel()
        return ids if ids[-1] < len(self.values) else ids[ids < len(self.values)]


def _blocks(values: F32Array, blocks: Ids) -> F32Array:
    """The values of these blocks, ascending, [n, 64]; the last block is padded with -infinity."""
    whole = len(values) // BLOCK_COLUMNS
    rows: F32Array = values[: whole * BLOCK_COLUMNS].reshape(-1, BLOCK_COLUMNS)
    if blocks[-1] < whole:
        return rows[blocks]
    last = np.full((1, BLOCK_COLUMNS), -np.inf, dtype=np.float32)
    last[0, : len(values) - whole * BLOCK_COLUMNS] = values[whole * BLOCK_COLUMNS :]
    return np.concatenate([rows[blocks[:-1]], last])


def _summary(values: F32Array, blocks: Ids, temperature: float) -> tuple[F32Array, F32Array]:
    """The peaks and sums of these blocks, ascending."""
    some = _blocks(values, blocks)
    peaks: F32Array = some.max(axis=1)
    if temperature == 0:
        return peaks, np.zeros_like(peaks)
    base = np.where(np.isfinite(peaks), peaks, 0)  # the sum of a masked block is 0
    weights = np.exp((some - base[:, None]) / np.float32(temperature))
    return peaks, weights.sum(axis=1)


def _best(values: F32Array, peaks: F32Array) -> int:
    start = int(peaks.argmax()) * BLOCK_COLUMNS
    return start + int(values[start : start + BLOCK_COLUMNS].argmax())
