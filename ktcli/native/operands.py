"""What a program is given: the operands of its operations, and a batch, the work of one step.

The C twins of a batch are kt_run and kt_step (native/include/kt_program.h).
"""

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
        """Returns the number of rows of the weight that projects to an activation of `width` columns: those of gate and
        up, each padded to whole panels, or of up alone if there is no gate.
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
        """Returns the fields of a C struct kt_update for this update, in their order; the struct borrows the memory of
        `a` and `b`.
        """
        in_f32 = self.a.dtype == np.float32
        where = (ffi.cast("void *", each.ctypes.data) for each in (self.a, self.b))
        panels, ones = self.b.shape[1], (self.a.shape[0] == 1, self.b.shape[0] == 1)
        return (
            self.rank, self.first_panel, self.panel_step, panels, self.scale, in_f32, *ones, *where
        )  # fmt: skip


class Run(NamedTuple):
    """Consecutive tokens of one sequence in a step.

    Attributes:
        ids: [n] int32 token ids, n >= 1.
        start: the position of the first token.
        pages: the cache page of each 64 positions of the sequence, int32.
        first_output: the first token that gives outputs, as all after it do; n: none.
        temperature: the temperature of the sums of a summary; 0: no sums are wanted.
        defer: the most experts per token that a split defers; 0: none.
        state: the slot of the state before `start`; -1: there is none yet, at start 0 only.
        next_state: the slot that gets the state after the run; -1: no operation keeps a state.
        chunk: the (start, tokens) of the prompt's chunk that the run is a piece of: it decides whatever depends on how
            many tokens go together; None: the run itself. (start, 1): each token gives what it gives alone, as drafted
            ones must.
        window_pages: the page of each 64 positions for the layers with a window, int32, read from the first on that the
            run's first token sees; None: they have no pages of their own.
        adapter: the number of the adapter whose updates its rows get; 0: none.
        expanded: the first position that takes the expanded form of latent attention, and the one behind the last; all
            others take the absorbed form.
    """

    ids: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    state: int = -1
    next_state: int = -1
    chunk: tuple[int, int] | None = None
    window_pages: NDArray[np.int32] | None = None
    expanded: tuple[int, int] = (0, 0)
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The runs of a step. Its rows are their tokens, run after run; its outputs lie in the order of rows.

    Attributes:
        runs: decoding runs first, then pieces of prompts: neighbours of a kind share the most work.
    """

    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """The number of tokens of all runs of the batch together."""
        return sum(run.ids.size for run in self.runs)
