"""What a piece of a checkpoint tensor is, said by slices of the whole array: the oracle of `strips.cut`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ktcli.native import Format
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Stored, Tensor
from ktcli.weights.columns import factors_of, suffers

# A tensor by itself, where nothing asks which part of a model it is: n, k, role, sources …
lone = partial(Tensor, "t", part=ModelPart.EXPERTS)


def chosen(tensor: Tensor, arrays: Mapping[str, Any]) -> tuple[Stored, ...]:
    """The first alternative whose names and shapes are there."""
    for pieces in tensor.sources:
        found = [arrays.get(piece.at(0)) for piece in pieces]
        pairs = zip(found, pieces, strict=True)
        if all(array is not None and tuple(array.shape) == p.shape for array, p in pairs):
            return pieces
    raise AssertionError(f"nothing gives {tensor.name}")


def view(array: Any, piece: Stored, index: int) -> Any:
    """What `piece` gives to matrix `index`, [rows, k] or [elements], of the whole tensor `array` (numpy or
    torch); a view of it."""
    if piece.matrix:
        array = array[index]
    if piece.band:
        start = index * piece.band.stride + piece.band.first
        array = array[start : start + piece.band.rows]
    if piece.transposed:
        array = array.T
    return array[piece.first :: piece.step][: piece.count or len(array)]


def column_factors(
    tensor: Tensor, fmt: Format | None, matrix: np.ndarray, gain: np.ndarray
) -> np.ndarray:
    """What the columns of a tensor's whole matrix are divided by before it is packed, and its gain multiplied with."""
    if fmt is None or tensor.gain is None or not suffers(fmt):
        return np.ones(tensor.k, np.float32)
    apart = max(tensor.n * 16 // 1024, 16)
    rows = [
        row
        for start in range(0, tensor.n, apart)
        for row in range(start, min(start + 16, tensor.n))
    ]
    return factors_of(np.abs(matrix[rows]).max(axis=0), gain)
