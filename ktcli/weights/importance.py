"""The importance of the columns of a model's matrices: how much a squared error in each counts.

The error of a product is the error of each weight times the input of its column, so a column counts as the mean square
of its inputs, over that of all columns of its matrix. It is kept in whole eighths of an octave, one byte each: STEPS to
a factor of two, 0 for a column like the mean. The last bits of sums, which differ between machines, are rounded away.

An expert that few tokens choose knows little of its inputs. A floor keeps it from starving: its mean is taken as if
FLOOR_TOKENS more had come, with the inputs of all experts of its layer (gate and up), or with columns of equal size
(down, whose columns are each expert's own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from ktcli.models import Model
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.records import dataclass

FLOOR_TOKENS = 32
STEPS = 8  # to a factor of two
MOST_STEPS = 80  # of an importance above or below that of the mean: a factor of 1024
# 2^(i / 8), correctly rounded to f32: written out, so that no machine's exponential function decides on bits.
_OCTAVE = np.array(
    [1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081], np.float32
)

StepArray = NDArray[np.int8]
Matrix = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """The importance of the columns of a model's matrices.

    Attributes:
        steps: by tensor, [count, k]; those of a tensor that is missing are all alike.
    """

    steps: Mapping[str, StepArray] = field(default_factory=dict)

    def row(self, name: str, index: int) -> Matrix | None:
        """Returns the importance of each column of matrix `index` of the tensor `name`, f32 [k]; 1 is that of the mean
        column. None: nothing is known of the tensor."""
        found = self.steps.get(name)
        return None if found is None else numbers_of(found[index])


UNKNOWN = Importance()


def measured(model: Model) -> tuple[Tensor, ...]:
    """Returns those of a model's tensors whose columns have an importance: those for which a recipe chooses a number
    format, which are routed experts and dense parts."""
    return tuple(t for t in model.tensors if t.role in (Role.EXPERTS, Role.DENSE))


def missing(model: Model, there: Iterable[str]) -> list[str]:
    """Returns the names of a model's tensors that should have an importance (see `measured`), but are not in `there`.

    Args:
        there: the names of the tensors whose importance is known.
    """
    known = set(there)
    return [tensor.name for tensor in measured(model) if tensor.name not in known]


def numbers_of(steps: StepArray) -> Matrix:
    """Returns the importance that int8 steps represent, 2^(step / 8) each, f32 of the same shape; the same bits on
    every machine."""
    octaves, rest = np.divmod(steps.astype(np.int32), STEPS)
    found: Matrix = np.ldexp(_OCTAVE[rest], octaves)
    return found


def steps_of(tensor: Tensor, squares: Doubles, rows: Doubles) -> StepArray:
    """Returns the importance of a tensor's columns as int8 steps [count, k]: a step is an eighth of an octave (a factor
    of 2^(1/8)) above or below the mean column.

    Args:
        squares: the sums of the squares of each column's inputs, [count, k].
        rows: how many input rows each matrix had, [count].
    """
    counts = rows[:, None]
    if tensor.role is Role.EXPERTS:
        flat = squares.sum() / max(1.0, float(rows.sum()) * tensor.k)
        prior = np.full((1, tensor.k), flat)
        if tensor.cut is Cut.ROWS and rows.sum():
            prior = squares.sum(0, keepdims=True) / rows.sum()
        means = (squares + FLOOR_TOKENS * prior) / (counts + FLOOR_TOKENS)
    else:
        means = squares / np.maximum(counts, 1.0)
    size = means.mean(1, keepdims=True)
    shares = np.where(size > 0, means / np.where(size > 0, size, 1.0), 1.0)
    most = 2.0 ** (MOST_STEPS / STEPS)
    found: StepArray = np.rint(np.log2(np.clip(shares, 1 / most, most)) * STEPS).astype(np.int8)
    return found
