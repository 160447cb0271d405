"""Describes what an adapter changes, part by part: modules, ranks, bytes, and the size of its update."""

from __future__ import annotations

import numpy as np

from ktcli.adapters.adapter import Adapter, LoraPair
from ktcli.ops.part import ModelPart
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class PartSummary:
    """The updates of one part of a model.

    Attributes:
        names: the last words of the modules' names.
        modules: the number of targets; of experts, each layer's gate, up and down count once.
        ranks, scales: those that occur, in ascending order.
        norm: the Frobenius norm of all its updates together, scale · B A.
    """

    part: ModelPart
    names: tuple[str, ...]
    modules: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    size_bytes: int
    norm: float


def summarised(adapter: Adapter) -> tuple[PartSummary, ...]:
    """Returns a summary of an adapter's updates (modules, ranks, scales, bytes, Frobenius norm) for each part of the
    model that they change, in the model's order; reads every number.

    Raises:
        BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
    """
    for gain in adapter.gains:
        adapter.gain(gain)
    return tuple(_summary(part, pairs, adapter) for part, pairs in adapter.parts.items())


def _summary(part: ModelPart, pairs: list[LoraPair], adapter: Adapter) -> PartSummary:
    return PartSummary(
        part,
        tuple(dict.fromkeys(pair.target.name.rpartition(".")[2] for pair in pairs)),
        len(pairs),
        tuple(sorted({pair.rank for pair in pairs})),
        tuple(sorted({pair.scale for pair in pairs})),
        sum(pair.size_bytes for pair in pairs),
        float(np.sqrt(sum(square_of(adapter, pair) for pair in pairs))),
    )


def square_of(adapter: Adapter, pair: LoraPair) -> float:
    """Returns the square of the Frobenius norm of the update of a LoRA pair (factors A and B of one target): the sum
    over its matrices of scale² ⟨A Aᵀ, Bᵀ B⟩, without the product itself.
    """
    a, b = (values.astype(np.float64) for values in adapter.values(pair))
    inner = (a @ a.swapaxes(1, 2)) * (b.swapaxes(1, 2) @ b)
    return max(float(inner.sum()), 0.0) * pair.scale**2
