"""What a program's operations and steps are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Glu(NamedTuple):
    """The activation between gate and up, and down: with g = min(gate, gate_limit), and up kept within
    -limit..limit, g / (1 + e^(-alpha g)) * (up + shift).

    Attributes:
        limit: 0: none.
        gate_limit: 0: that of up.
    """

    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    gate_limit: float = 0.0


SILU = Glu()  # silu(gate) * up


@dataclass(frozen=True, slots=True)
class View:
    """Columns [column, column + width) of a program buffer."""

    buffer: int
    column: int
    width: int


@dataclass(frozen=True, slots=True)
class Step:
    """What changes from step to step.

    Attributes:
        ids: [T] int32 token ids.
        start: position of the first.
        pages: int32 cache page of each run of 64 positions.
        first_output: rows from here on give outputs; T: none.
        temperature: of the sums of a summary; 0: none are wanted.
        defer: experts per token that a split defers, at most; 0: none.
        state: what operations that keep a state left before `start`; None, at 0 only: nothing came before.
        next_state: where they leave it now; None: there are no such operations.
    """

    ids: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    state: NDArray[np.float32] | None = None
    next_state: NDArray[np.float32] | None = None
