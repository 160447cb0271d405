"""Merges an adapter into a checkpoint's numbers as they are read: W + scale · B A in f32, wherever the rows are
stored.

The layout of the adapter and that of the checkpoint need not be the same: both are rows of one stored tensor. Packed
codes are never changed: rounding them again loses most of a small update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from threading import Lock

import numpy as np

from ktcli.adapters.adapter import Adapter, LoraPair, LowRank, NewGain, placed
from ktcli.adapters.factors import F32
from ktcli.adapters.targets import EACH, Rows, rows_in
from ktcli.ops.tensors import Stored, Tensor
from ktcli.records import dataclass
from ktcli.weights.storage import Matrix, Reader
from ktcli.weights.strips import pieces_of

_HELD = 8  # pairs whose values are in memory: those of one layer's parts


@dataclass(frozen=True, slots=True, eq=False)
class _CheckpointShare:
    """The rows of one checkpoint tensor that an update changes.

    Attributes:
        stored: which rows of the tensor belong to the update's stored tensor.
        chosen: of each of them, the row of the update's b; -1: it has none.
        index: the matrix, where each has a tensor of its own; -1: the tensor has all.
    """

    update: LowRank
    stored: Stored
    chosen: Rows
    index: int = -1


class MergedAdapter:
    """The change that an adapter is to the tensors of a checkpoint; see `weights.changed`.

    Args:
        tensors: those of the model that both are of.
    Raises:
        BadCheckpoint: the checkpoint lacks a tensor.
    """

    def __init__(self, adapter: Adapter, tensors: Sequence[Tensor], checkpoint: Reader) -> None:
        self._adapter = adapter
        self._shares: dict[str, list[_CheckpointShare]] = {}
        self._gains: dict[str, NewGain] = {}
        self._values: dict[int, tuple[F32, F32]] = {}
        self._lock = Lock()
        updates: dict[str, list[LowRank]] = {}
        for update in adapter.updates:
            if not update.flipped:  # it repeats, transposed, what another has
                updates.setdefault(update.tensor.name, []).append(update)
        gains = {gain.tensor.name: gain for gain in adapter.gains}
        for tensor in tensors:
            if tensor.name in gains:
                self._gains[pieces_of(tensor, checkpoint)[0].name] = gains[tensor.name]
            elif tensor.name in updates:
                for name, share in _shares(tensor, updates[tensor.name], checkpoint):
                    self._shares.setdefault(name, []).append(share)

    @property
    def digest(self) -> str:
        """The SHA-256 of the adapter's files, hexadecimal."""
        return self._adapter.digest

    @property
    def names(self) -> Collection[str]:
        """The names of the checkpoint tensors that the adapter changes."""
        return (*self._shares, *self._gains)

    def apply(self, name: str, start: int, values: Matrix) -> Matrix:
        """Returns rows [start, start + len(values)) of the checkpoint tensor `name` with the adapter merged in, f32.

        Args:
            values: these rows as the checkpoint has them, f32; they may be changed in place.
        """
        if gain := self._gains.get(name):
            return self._adapter.gain(gain).reshape(values.shape)
        for share in self._shares[name]:
            self._add(share, start, values)
        return values

    def _add(self, share: _CheckpointShare, start: int, values: Matrix) -> None:
        """Adds an update's share to rows of a tensor."""
        a, b = placed(share.update, *self._pair(share.update.pair))
        height = _height(share.stored)
        for index, matrix_start in _matrices(share, start, len(values), height):
            low, high = max(start, matrix_start), min(start + len(values), matrix_start + height)
            if low >= high:
                continue
            inside = values[low - start : high - start]
            left, right = _as_stored(share, a[index], b[index], height)
            scale = np.float32(share.update.scale)
            inside += scale * (left[low - matrix_start : high - matrix_start] @ right)

    def _pair(self, pair: LoraPair) -> tuple[F32, F32]:
        """The values of a pair, kept for the rows that follow."""
        with self._lock:
            found = self._values.pop(id(pair), None)
            found = self._adapter.values(pair) if found is None else found
            self._values[id(pair)] = found
            while len(self._values) > _HELD:
                self._values.pop(next(iter(self._values)))
            return found


def _shares(
    tensor: Tensor, updates: Sequence[LowRank], checkpoint: Reader
) -> Iterator[tuple[str, _CheckpointShare]]:
    """Yields the shares of a stored tensor's updates in the checkpoint's tensors, by the names of these."""
    pieces = pieces_of(tensor, checkpoint)
    for update in updates:
        place = np.full(tensor.n, -1, np.int32)
        place[update.rows] = np.arange(len(update.rows), dtype=np.int32)
        for stored, rows in zip(pieces, rows_in(tensor, pieces), strict=True):
            chosen = place[rows]
            if (chosen < 0).all():
                continue
            for index in range(tensor.count) if EACH in stored.name else (-1,):
                yield stored.at(index), _CheckpointShare(update, stored, chosen, index)


def _height(stored: Stored) -> int:
    """The number of rows of one matrix in a checkpoint tensor."""
    return stored.band.rows if stored.band else stored.one[0]


def _matrices(
    share: _CheckpointShare, start: int, count: int, height: int
) -> Iterator[tuple[int, int]]:
    """Yields the matrices that some rows of a tensor may touch, and the first row of each."""
    stored, n = share.stored, share.update.tensor.count
    if stored.band:
        yield from ((i, i * stored.band.stride + stored.band.first) for i in range(n))
    elif stored.matrix:
        last = min((start + count - 1) // height, n - 1)
        yield from ((i, i * height) for i in range(start // height, last + 1))
    else:
        yield max(share.index, 0), 0


def _as_stored(share: _CheckpointShare, a: F32, b: F32, height: int) -> tuple[F32, F32]:
    """The factors (left [height, r], right [r, width]) of what is added to one matrix as the checkpoint has it."""
    stored, known = share.stored, share.chosen >= 0
    n = stored.one[-1] if stored.transposed else height
    whole = np.zeros((n, b.shape[1]), np.float32)
    first = 0 if stored.band else stored.first
    at = first + stored.step * np.flatnonzero(known)
    whole[at] = b[share.chosen[known]]
    return (np.ascontiguousarray(a.T), whole.T) if stored.transposed else (whole, a)
