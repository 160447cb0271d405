"""Rows of the table: what keeps a state of fixed size of each sequence: convolutions, linear attention, and windows of
positions that become rows."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ktcli.ops.operation import (
    FieldKind,
    Implied,
    Operation,
    Rows,
    StateFirst,
    StateOf,
    Vector,
    Widths,
)
from ktcli.ops.tensors import ceil_to


@dataclass(frozen=True, slots=True)
class Conv(Operation):
    """Causal convolution of each column over the last rows of its sequence, then silu. weight [1, W * N]: rows of N
    columns for the last W rows of x, the oldest first. State: W - 1 rows.

    first: where it begins in the layer's, f32 elements; whole lines of 16."""

    name = "conv"
    reads_step = True
    derived = ("width",)

    x: Rows
    weight: Vector
    _: KW_ONLY
    layer: StateOf
    first: StateFirst = 0

    @property
    def width(self) -> int:
        """Rows of x that a row sees, itself included."""
        columns: int = self.x.width
        return self.weight.k // columns

    def widths(self) -> Widths:
        return {"out": self.x.width, "weight": self.width * self.x.width}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Windows of positions that become one row of `dim` columns each; see kt_program_pooling for the exact rule.

    Attributes:
        every: positions of a window.
        overlap: the window before takes part, with columns of its own.
    """

    dim: Implied
    every: int
    overlap: bool

    @property
    def columns(self) -> int:
        """Of each position's row."""
        return 2 * self.dim if self.overlap else self.dim

    @property
    def state_elements(self) -> int:
        """f32: greatest score, sum of powers and weighted sum, of the open window and of the next."""
        return ceil_to(3 * self.columns, 16)


@dataclass(frozen=True, slots=True)
class Pooling(Operation):
    """Rows of windows of positions, see kt_program_pooling -> [T, dim]. bias: [1, every * columns of x].

    first: where its state begins in the layer's, f32 elements; whole lines of 16."""

    name = "pooling"
    reads_step = True

    x: Rows
    score: Rows
    bias: Vector
    shape: PoolShape
    _: KW_ONLY
    layer: StateOf
    first: StateFirst

    def widths(self) -> Widths:
        s = self.shape
        return {"out": s.dim, "x": s.columns, "score": s.columns, "bias": s.every * s.columns}


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The gated delta rule of one layer: a state [dk, dv] for each of `heads`, of which so many in a row share
    one of `key_heads`.

    Attributes:
        by_channel: each of a head's dk rows decays by itself, else all of a head alike.
        lowest: the logarithm of what a token leaves of a state is above this, negative; 0: nothing bounds it.
    """

    heads: int
    key_heads: int
    dk: int
    dv: int
    by_channel: Annotated[bool, FieldKind.IMPLIED] = False
    lowest: float = 0.0

    @property
    def decays(self) -> int:
        """Columns of the decay."""
        return self.heads * (self.dk if self.by_channel else 1)

    @property
    def state_elements(self) -> int:
        """f32 of a sequence's states: columns in whole lines."""
        return self.heads * self.dk * ceil_to(self.dv, 16)


@dataclass(frozen=True, slots=True)
class Delta(Operation):
    """Gated delta rule, see kt_program_delta -> [T, heads * dv]. Overwrites q, k and the gates.

    Args:
        decay, beta: the gates, [T, decays] and [T, heads].
        log_rate, bias: learned: the log of each head's rate, and what is added to the decay.
        first: where its state begins in the layer's, f32 elements; whole lines of 16.
    """

    name = "delta"
    overwrites = ("q", "k", "decay", "beta")
    reads_step = True

    q: Rows
    k: Rows
    v: Rows
    decay: Rows
    beta: Rows
    log_rate: Vector
    bias: Vector
    shape: DeltaShape
    _: KW_ONLY
    layer: StateOf
    first: StateFirst

    def widths(self) -> Widths:
        s = self.shape
        keys, values = s.key_heads * s.dk, s.heads * s.dv
        views = {"out": values, "q": keys, "k": keys, "v": values, "decay": s.decays}
        return {**views, "beta": s.heads, "log_rate": s.heads, "bias": s.decays}
