"""The operands of a program's operations and of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Glu(NamedTuple):
    """The activation between gate and up, and down: with g = min(gate, gate_limit), and up kept within -limit..limit, g
    / (1 + e^(-alpha g)) * (up + shift).

    Attributes:
        limit: the bound of up; 0: none.
        gate_limit: the bound of gate; 0: the same as up's.
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
    """The inputs of one step.

    Attributes:
        ids: [T] int32 token ids.
        start: the position of the first token.
        pages: the cache page of each run of 64 positions, int32.
        first_output: the first row that gives outputs, as all after it do; T: none.
        temperature: the temperature of the sums of a summary; 0: no sums are wanted.
        defer: the most experts per token that a split defers; 0: none.
        state: the state of the sequence before `start`, f32; None: there is none yet, at start 0 only.
        next_state: memory for the state after this step; None: no operation keeps a state.
    """

    ids: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    state: NDArray[np.float32] | None = None
    next_state: NDArray[np.float32] | None = None
