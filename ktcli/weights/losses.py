"""Computes the errors and cosines for a manifest from the sums that the encoder counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ktcli.errors import BadPack
from ktcli.manifest import PACK, Manifest
from ktcli.native import PackError
from ktcli.ops.tensors import Tensor
from ktcli.weights.pack import WeightFile
from ktcli.weights.recipe import TensorKind, kind_of

ERROR_DIGITS, COSINE_DECIMALS = 4, 7

ByKind = dict[str, float]


def losses(sums: Mapping[TensorKind, PackError]) -> tuple[ByKind, ByKind]:
    """Returns two dicts by kind of tensor ("experts", "dense" …): the relative error of the stored weights, and the
    expected cosine between the products of the original and of the stored weights."""
    there = {kind.value: sums[kind] for kind in TensorKind if kind in sums}
    errors = {name: _relative(each.error, each.square) for name, each in there.items()}
    return errors, {name: _cosine(each) for name, each in there.items()}


def weighted(sums: Mapping[TensorKind, PackError]) -> ByKind:
    """Returns the relative error of the stored weights by kind of tensor ("experts", "dense" …), with each column
    weighted by its importance."""
    there = {kind.value: sums[kind] for kind in TensorKind if kind in sums}
    return {name: _relative(each.out_error, each.out_square) for name, each in there.items()}


def overall(files: Sequence[WeightFile], manifest: Manifest) -> ByKind:
    """Returns the relative error of the whole model by kind of tensor ("experts", "dense" …): the root mean square of
    those of its weight files, weighted by their numbers of elements.

    Raises:
        BadPack: the manifest lists other files than `files`.
    """
    if [file.name for file in files] != [record.name for record in manifest.files]:
        raise BadPack(f"{PACK} lists weight files that do not match its model")
    squares: dict[str, list[tuple[float, int]]] = {}
    for file, record in zip(files, manifest.files, strict=True):
        for kind, error in record.error.items():
            weight = sum(t.elements for t in file.tensors if _kind_name(t) == kind)
            squares.setdefault(kind, []).append((error * error, weight))
    return {
        kind: _relative(sum(e * w for e, w in rows), sum(w for _, w in rows))
        for kind, rows in squares.items()
    }


def _kind_name(tensor: Tensor) -> str:
    kind = kind_of(tensor)
    return kind.value if kind else ""


def _cosine(sums: PackError) -> float:
    """The cosine between W x and W' x, from <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2; 1 where both are 0."""
    sizes = math.sqrt(sums.out_square * sums.out_stored)
    both = sums.out_square + sums.out_stored - sums.out_error
    return round(both / (2 * sizes), COSINE_DECIMALS) if sizes else 1.0


def _relative(sum_sq_error: float, sum_sq: float) -> float:
    value = math.sqrt(sum_sq_error / sum_sq) if sum_sq > 0 else 0.0
    return float(f"{value:.{ERROR_DIGITS}g}")
