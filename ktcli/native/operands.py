"""The operands of a program's operations."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.native.library import PANEL_ROWS
from ktcli.records import dataclass


class Glu(NamedTuple):
    """The parameters of the activation between gate and up, and down: with g = min(gate, gate_limit), and up clamped to
    -limit..limit, g / (1 + e^(-alpha (g + cubic g^3))) * (up + shift). Without a gate: max(0, up)^2.

    Attributes:
        limit: the bound of up; 0: none.
        gate_limit: the bound of gate; 0: the same as up's.
        ungated: whether there is no gate; nothing else counts then.
    """

    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    gate_limit: float = 0.0
    cubic: float = 0.0
    ungated: bool = False

    def rows(self, width: int) -> int:
        """Returns the number of rows of the weight that projects to an activation of `width` columns: gate and up, each
        in whole panels, or up alone without a gate.
        """
        return width if self.ungated else 2 * -(-width // PANEL_ROWS) * PANEL_ROWS


SILU = Glu()  # silu(gate) * up
SQUARED_RELU = Glu(ungated=True)  # max(0, up)^2
# gelu(gate) * up, by its approximation with tanh
GELU_TANH = Glu(alpha=2 * sqrt(2 / pi), cubic=0.044715)


@dataclass(frozen=True, slots=True)
class View:
    """Columns [column, column + width) of a program buffer."""

    buffer: int
    column: int
    width: int


class Update(NamedTuple):
    """The low-rank update that an adapter adds to rows of a product y = W x: y[rows] += scale * B (A x); see kt_update.

    Attributes:
        first_panel: of the rows, in panels of 16 of W's; each panel_step-th from there on is one of B's.
        a: [count, rank, k rounded up to 16], bf16 bits or f32, zeros behind k; [1, …]: the same for all matrices.
        b: [count, panels, rank, 16], of the same type, zeros for rows that are not changed; likewise.
    """

    rank: int
    first_panel: int
    panel_step: int
    scale: float
    a: NDArray[Any]
    b: NDArray[Any]

    def packed(self, ffi: Any) -> tuple[Any, ...]:
        """Returns the fields of its kt_update, which borrows the memory of `a` and `b`."""
        in_f32 = self.a.dtype == np.float32
        where = (ffi.cast("void *", each.ctypes.data) for each in (self.a, self.b))
        panels, ones = self.b.shape[1], (self.a.shape[0] == 1, self.b.shape[0] == 1)
        return (
            self.rank, self.first_panel, self.panel_step, panels, self.scale, in_f32, *ones, *where
        )  # fmt: skip
