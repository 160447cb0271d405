"""The operands of a program's operations."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt
from typing import NamedTuple

from ktcli.native.library import PANEL_ROWS


class Glu(NamedTuple):
    """The activation between gate and up, and down: with g = min(gate, gate_limit), and up kept within -limit..limit, g
    / (1 + e^(-alpha (g + cubic g^3))) * (up + shift). Without a gate: max(0, up)^2.

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
        """Returns the rows of the weight whose products are activated to `width` columns: of gate and of up, each in
        whole panels, or without a gate of up alone."""
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
