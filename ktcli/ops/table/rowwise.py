"""Rows of the table: what is done to each row by itself, products with matrices among them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import IntEnum

from ktcli.native import BLOCK_COLUMNS, PANEL_ROWS, SILU, Glu
from ktcli.ops.operation import Implied, Matrix, Operation, Rows, Table, Vector, Widths
from ktcli.ops.tensors import ceil_to


class Reads(IntEnum):
    """What a product reads its activations as; values of `kt_reads`."""

    FORMAT = 0
    F32 = 1
    WIDE = 2


class GateKind(IntEnum):
    """What of a gate multiplies; values of `kt_gate_kind`."""

    SIGMOID = 0
    SILU = 1
    SOFTPLUS = 2


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Attributes:
        dim: rotated columns per head, even.
        inv_freq: radians per position of each pair, length dim/2.
        scale: factor on cos and sin (YaRN's attention factor).
        interleaved: pairs are (2i, 2i+1) instead of (i, i + dim/2).
        shift: added to positions.
    """

    dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """The step's ids -> [T, hidden]."""

    name = "embed"
    reads_step = True
    derived = ("vocab",)

    table: Table

    @property
    def vocab(self) -> int:
        """Rows of the table."""
        return self.table.n

    def widths(self) -> Widths:
        return {"out": self.table.k}


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """RMSNorm of each row; of each run of `head_width` columns; or of the first `columns` only, the rest passing
    through. The last two overwrite x. Without a gain it only divides."""

    name = "norm"

    x: Rows
    gain: Vector | None
    eps: float
    _: KW_ONLY
    head_width: int | None = None
    columns: int | None = None

    @property
    def in_place(self) -> bool:
        return self.head_width is not None or self.columns is not None

    def widths(self) -> Widths:
        return {"out": self.x.width, "gain": self.head_width or self.columns or self.x.width}


@dataclass(frozen=True, slots=True)
class LayerNorm(Operation):
    """LayerNorm of each row: less its mean, over its standard deviation, times gain, plus bias."""

    name = "layer_norm"

    x: Rows
    gain: Vector
    bias: Vector
    eps: float

    def widths(self) -> Widths:
        return dict.fromkeys(("out", "gain", "bias"), self.x.width)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """x W^T + bias; activations as the weight's format says, or better."""

    name = "linear"

    x: Rows
    weight: Matrix
    _: KW_ONLY
    bias: Vector | None = None
    reads: Reads = Reads.FORMAT

    def widths(self) -> Widths:
        n, k = self.weight.n, self.x.width
        return {"out": n, "weight": (1, n, k), "bias": n}


@dataclass(frozen=True, slots=True)
class Rotate(Operation):
    """Rotates columns [first, first + dim) of each run of `head_width`; overwrites x."""

    name = "rope"
    outs = ()
    overwrites = ("x",)
    reads_step = True

    x: Rows
    rope: Rope
    _: KW_ONLY
    head_width: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Swiglu(Operation):
    """silu(gate) * up, or another such activation, of alternating runs of 16 -> [T, width]."""

    name = "swiglu"

    x: Rows
    width: Implied
    glu: Glu = SILU

    def widths(self) -> Widths:
        return {"x": 2 * ceil_to(self.width, PANEL_ROWS), "out": self.width}


@dataclass(frozen=True, slots=True)
class GateRows(Operation):
    """x times sigmoid, silu or softplus of by; `by` has a column for each of as many runs of x's columns."""

    name = "gate"

    x: Rows
    by: Rows
    kind: GateKind = GateKind.SIGMOID

    def widths(self) -> Widths:
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """a + b."""

    name = "add"

    a: Rows
    b: Rows

    def widths(self) -> Widths:
        return {"out": self.a.width, "b": self.a.width}


@dataclass(frozen=True, slots=True)
class ScaleRows(Operation):
    """x times a number; overwrites x."""

    name = "scale"

    x: Rows
    by: float

    @property
    def in_place(self) -> bool:
        return True

    def widths(self) -> Widths:
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Select(Operation):
    """The rows that are wanted as outputs -> [outputs, hidden]."""

    name = "select"
    reads_step = True
    selects = True

    x: Rows

    def widths(self) -> Widths:
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Summary(Operation):
    """What choosing a token needs to know of each row of logits: see kt_program_summary for the exact rule."""

    name = "summary"
    outs = ("best", "peaks", "sums")

    logits: Rows

    def widths(self) -> Widths:
        blocks = -(-self.logits.width // BLOCK_COLUMNS)
        return {"best": 1, "peaks": blocks, "sums": blocks}
