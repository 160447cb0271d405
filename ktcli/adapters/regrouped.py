"""Converts factors of experts to the other layout: separate A for gate and up, or a common A of twice the rank.

Both are rows of one stored tensor, through which the rows of one layout find those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ktcli.adapters.adapter import Adapter, LoraPair, chosen_rows, updates_of
from ktcli.adapters.factors import F32
from ktcli.adapters.targets import LoraTarget, Rows, Targets
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Half:
    """The update of one target of each expert, as a part of a pair.

    Attributes:
        values: returns A [count, r, k] and B [count, n, r], f32.
    """

    target: LoraTarget
    pair: LoraPair
    values: Callable[[], tuple[F32, F32]]


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The update of one parameter of all experts.

    Attributes:
        values: returns A [count, r, k] and B [count, n, r], f32.
    """

    rank: int
    scale: float
    dtype: str
    values: Callable[[], tuple[F32, F32]]


def halves_of(pair: LoraPair, targets: Targets, adapter: Adapter) -> Iterator[Half]:
    """Yields the update of a LoRA pair of routed experts as updates of targets that are a module of each expert: the
    pair itself if its target is one; for a parameter that holds gate and up, one update for each, both with the same A.
    """
    if pair.target.is_each:
        yield Half(pair.target, pair, lambda: adapter.values(pair))
        return
    (update,) = updates_of(pair)
    for target in targets.each_of(update.tensor):
        rows = _own_rows(target, update.tensor.n)
        inside = rows[update.rows]
        taken = np.empty(target.n, np.int32)
        taken[inside[inside >= 0]] = update.taken[inside >= 0]

        def values(taken: Rows = taken) -> tuple[F32, F32]:
            a, b = adapter.values(pair)
            return a, b[:, taken]

        yield Half(target, pair, values)


def whole_of(target: LoraTarget, pairs: list[LoraPair], adapter: Adapter) -> Regrouped:
    """Returns the sum of the updates of `pairs` as one update of `target`, a parameter that holds all experts. Its rank
    is the sum of the pairs' ranks, for example of gate and up.
    """
    scale = pairs[0].scale
    dtypes = {pair.dtype for pair in pairs}
    exact = len(dtypes) == 1 and all(pair.scale == scale for pair in pairs)
    rank = sum(pair.rank for pair in pairs)

    def values() -> tuple[F32, F32]:
        if pairs == [pairs[0]] and pairs[0].target.name == target.name:
            return adapter.values(pairs[0])
        all_a, whole, at = [], np.zeros((target.count, target.n, rank), np.float32), 0
        for pair in pairs:
            (update,) = updates_of(pair)
            rows = _own_rows(target, update.tensor.n)[update.rows]
            a, b = adapter.factors(update)
            quotient = np.float32(pair.scale / scale) if scale else np.float32(1)
            whole[:, rows, at : at + pair.rank] = b if pair.scale == scale else b * quotient
            all_a.append(a)
            at += pair.rank
        return np.concatenate(all_a, axis=1), whole

    return Regrouped(rank, scale, dtypes.pop() if exact else "F32", values)


def _own_rows(target: LoraTarget, n: int) -> Rows:
    """The row of a target that each row of its stored tensor is, [n]; -1: none."""
    found = np.full(n, -1, np.int32)
    for piece in target.pieces:
        found[piece.rows] = chosen_rows(piece)
    return found
