"""Rows of the table for operations with a fixed-size state per sequence: convolutions, linear attention, state space
models, and pooling of windows of positions."""

import math
from dataclasses import KW_ONLY
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
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Conv(Operation):
    """Convolves each column causally over the last rows of its sequence, and applies silu unless `linear`.

    weight [1, W * N] holds rows of N columns for the last W rows of x, the oldest first; bias [1, N] is added. The
    state is W - 1 rows and begins with f32 element `first` of the layer's, a multiple of 16."""

    name = "conv"
    reads_step = True
    derived = ("width",)

    x: Rows
    weight: Vector
    _: KW_ONLY
    layer: StateOf
    first: StateFirst = 0
    bias: Vector | None = None
    linear: bool = False

    @property
    def width(self) -> int:
        """The width of the convolution: the number of rows of x that one result row depends on, its own included."""
        columns: int = self.x.width
        return self.weight.k // columns

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the result `out`, and the numbers of elements of weight and
        bias.
        """
        columns: int = self.x.width
        return {"out": columns, "weight": self.width * columns, "bias": columns}


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The sizes and constants of pooling: windows of positions become one row of `dim` columns each; see
    kt_program_pooling.

    Attributes:
        every: the number of positions of a window.
        overlap: whether the window before takes part, with columns of its own.
    """

    dim: Implied
    every: int
    overlap: bool

    @property
    def columns(self) -> int:
        """The number of columns of each position's row of values or scores: `dim`, or twice as
        many if windows overlap.
        """
        return 2 * self.dim if self.overlap else self.dim

    @property
    def state_elements(self) -> int:
        """The number of f32 elements of a sequence's state in the layer: the partial softmax (greatest score, sum of
        powers, weighted sum) of the open window and, if windows overlap, of the next.
        """
        return ceil_to(3 * self.columns, 16)


@dataclass(frozen=True, slots=True)
class Pooling(Operation):
    """Pools each window of positions into one row, see kt_program_pooling -> [T, dim].

    bias is [1, every * columns of x]. Its state begins with f32 element `first` of the layer's, a multiple of 16."""

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
        """Returns, by field name, the numbers of columns of the result `out`, x and `score`, and the number of elements
        of the bias.
        """
        s = self.shape
        return {"out": s.dim, "x": s.columns, "score": s.columns, "bias": s.every * s.columns}


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes and constants of one layer's gated delta rule: a state [dk, dv] for each of `heads`, of which heads /
    key_heads consecutive ones share a key head.

    Attributes:
        by_channel: whether each of a head's dk rows has a decay of its own; else they share one.
        lowest: lower bound of the logarithm of the decay, negative; 0: there is none.
    """

    heads: int
    key_heads: int
    dk: int
    dv: int
    by_channel: Annotated[bool, FieldKind.IMPLIED] = False
    lowest: float = 0.0

    @property
    def columns(self) -> tuple[int, int, int]:
        """The numbers of columns of q, of k and of v, all heads together."""
        return self.key_heads * self.dk, self.key_heads * self.dk, self.heads * self.dv

    @property
    def decays(self) -> int:
        """The number of columns of the decay: one for each head, or one for each of a head's dk channels."""
        return self.heads * (self.dk if self.by_channel else 1)

    @property
    def state_elements(self) -> int:
        """The number of f32 elements of a sequence's state in the layer: [dk, dv] for each head, with dv rounded up to
        a multiple of 16.
        """
        return self.heads * self.dk * ceil_to(self.dv, 16)


@dataclass(frozen=True, slots=True)
class Delta(Operation):
    """Applies the gated delta rule, see kt_program_delta -> [T, heads * dv]. Overwrites q, k and the gates.

    Args:
        decay, beta: the gates, [T, decays] and [T, heads].
        log_rate, bias: learned vectors: the log of each head's rate, and what is added to the decay.
        first: f32 element of the layer's state with which its own begins, a multiple of 16.
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
        """Returns, by field name, the numbers of columns of the result `out`, q, k, v, decay and beta, and the numbers
        of elements of the learned vectors log_rate and bias.
        """
        s = self.shape
        q, k, v = s.columns
        views = {"out": v, "q": q, "k": k, "v": v, "decay": s.decays}
        return {**views, "beta": s.heads, "log_rate": s.heads, "bias": s.decays}


@dataclass(frozen=True, slots=True)
class ScanShape:
    """The sizes and constants of one layer's state space model (Mamba-2): a state [state_dim, head_dim] for each of
    `heads`, of which heads / groups consecutive ones share b and c.

    Attributes:
        dt_min, dt_max: the bounds of the time step; dt_max may be infinite.
    """

    heads: int
    groups: int
    state_dim: int
    head_dim: int
    dt_min: float = 0.0
    dt_max: float = math.inf

    @property
    def state_elements(self) -> int:
        """The number of f32 elements of a sequence's state in the layer: [state_dim, head_dim] for each head, with
        head_dim rounded up to a multiple of 16.
        """
        return self.heads * self.state_dim * ceil_to(self.head_dim, 16)


@dataclass(frozen=True, slots=True)
class Scan(Operation):
    """Applies the state space model of Mamba-2, see kt_program_scan -> [T, heads * head_dim]. Overwrites dt.

    Args:
        b, c: what enters the state, and what is read of it, [T, groups * state_dim] each.
        dt: the time steps [T, heads], before their bias and softplus.
        log_rate, bias, skip: learned vectors [heads]: the log of each head's rate, what is added to dt, and the share
            of x that passes by.
        first: f32 element of the layer's state with which its own begins, a multiple of 16.
    """

    name = "scan"
    overwrites = ("dt",)
    reads_step = True

    x: Rows
    b: Rows
    c: Rows
    dt: Rows
    log_rate: Vector
    bias: Vector
    skip: Vector
    shape: ScanShape
    _: KW_ONLY
    layer: StateOf
    first: StateFirst

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, x, b, c and dt, and the numbers of
        elements of the learned vectors log_rate, bias and skip.
        """
        s = self.shape
        values, groups = s.heads * s.head_dim, s.groups * s.state_dim
        views = {"out": values, "x": values, "b": groups, "c": groups, "dt": s.heads}
        return {**views, "log_rate": s.heads, "bias": s.heads, "skip": s.heads}


@dataclass(frozen=True, slots=True)
class LightningShape:
    """The sizes and constants of one layer's lightning attention: a state [head_dim, head_dim] for each of `heads`.

    Attributes:
        rates: the rate of each head's decay: a token multiplies its state by e^-rate.
    """

    heads: int
    head_dim: int
    rates: tuple[float, ...]

    @property
    def state_elements(self) -> int:
        """The number of f32 elements of a sequence's state in the layer: [head_dim, head_dim] for each head, with the
        columns rounded up to a multiple of 16.
        """
        return self.heads * self.head_dim * ceil_to(self.head_dim, 16)


@dataclass(frozen=True, slots=True)
class Lightning(Operation):
    """Applies lightning attention, linear attention with a fixed decay, see kt_program_lightning -> [T, heads *
    head_dim].

    Args:
        first: f32 element of the layer's state with which its own begins, a multiple of 16.
    """

    name = "lightning"
    reads_step = True

    q: Rows
    k: Rows
    v: Rows
    shape: LightningShape
    _: KW_ONLY
    layer: StateOf
    first: StateFirst = 0

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, q, k and v, which are equal."""
        return dict.fromkeys(("out", "q", "k", "v"), self.shape.heads * self.shape.head_dim)
