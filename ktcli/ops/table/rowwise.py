"""Rows of the table for operations on single rows, including products with matrices."""

from dataclasses import KW_ONLY
from enum import IntEnum

from ktcli.native import BLOCK_COLUMNS, SILU, Glu
from ktcli.ops.operation import Implied, Matrix, Operation, Rows, Table, Vector, Widths
from ktcli.records import dataclass


class Reads(IntEnum):
    """The type to which a product rounds its activations; values of `kt_reads`."""

    FORMAT = 0
    F32 = 1
    WIDE = 2
    GROUPS = 3


class GateKind(IntEnum):
    """The function of a gate that multiplies; values of `kt_gate_kind`."""

    SIGMOID = 0
    SILU = 1
    SOFTPLUS = 2
    LINEAR = 3


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Attributes:
        dim: rotated columns per head, even.
        inv_freq: radians per position of each pair, length dim/2.
        scale: factor on cos and sin (YaRN's attention factor).
        interleaved: pairs are (2i, 2i+1) instead of (i, i + dim/2).
        shift: the number added to positions.
    """

    dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Temper:
    """The temperature of attention by position: queries times 1 + beta * log(1 + floor((position + shift) / every)).

    Attributes:
        every: positions, from 1 on.
    """

    beta: float
    every: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Embed(Operation):
    """Looks up the embedding rows of the step's ids -> [T, hidden]."""

    name = "embed"
    reads_step = True
    derived = ("vocab",)

    table: Table

    @property
    def vocab(self) -> int:
        """The number of rows of the embedding table, one for each token id."""
        return self.table.n

    def widths(self) -> Widths:
        """Returns {"out": n}: n is the number of columns of the result, and equals that of the embedding table."""
        return {"out": self.table.k}


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """Applies RMSNorm to each row, to each run of `head_width` columns, or to the first `columns` alone.

    The last two overwrite x. Without a gain it only divides. With `own_gains` each run has gains of its own."""

    name = "norm"

    x: Rows
    gain: Vector | None
    eps: float
    _: KW_ONLY
    head_width: int | None = None
    columns: int | None = None
    own_gains: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the norm overwrites x, as it does if it normalises runs of columns or only the first columns."""
        return self.head_width is not None or self.columns is not None

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the result `out`, and the number of elements of the gain."""
        together = None if self.own_gains else self.head_width
        return {"out": self.x.width, "gain": together or self.columns or self.x.width}


@dataclass(frozen=True, slots=True)
class LayerNorm(Operation):
    """Applies LayerNorm to each row: (x - mean) / standard deviation * gain + bias."""

    name = "layer_norm"

    x: Rows
    gain: Vector
    bias: Vector
    eps: float

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the result `out` and the numbers of elements of gain and
        bias: all as many as x has columns.
        """
        return dict.fromkeys(("out", "gain", "bias"), self.x.width)


@dataclass(frozen=True, slots=True)
class Linear(Operation):
    """Computes x W^T + bias, with activations in the type that the weight's format says, or a better one."""

    name = "linear"

    x: Rows
    weight: Matrix
    _: KW_ONLY
    bias: Vector | None = None
    reads: Reads = Reads.FORMAT

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of the result `out`, the (1, n, k) of the weight, and the
        number of elements of the bias.
        """
        n, k = self.weight.n, self.x.width
        return {"out": n, "weight": (1, n, k), "bias": n}


@dataclass(frozen=True, slots=True)
class Rotate(Operation):
    """Applies rotary embeddings to columns [first, first + dim) of each run of `head_width`; overwrites x."""

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
    """Computes silu(gate) * up, or the activation that `glu` says, of alternating runs of 16 columns, or of up alone ->
    [T, width]."""

    name = "swiglu"

    x: Rows
    width: Implied
    glu: Glu = SILU

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of x (gate and up in whole runs of 16, or up alone) and of the
        result `out`.
        """
        return {"x": self.glu.rows(self.width), "out": self.width}


@dataclass(frozen=True, slots=True)
class GateRows(Operation):
    """Multiplies x by `by`, or its sigmoid, silu or softplus; each column of `by` counts for an equal run of columns
    of x."""

    name = "gate"

    x: Rows
    by: Rows
    kind: GateKind = GateKind.SIGMOID

    def widths(self) -> Widths:
        """Returns {"out": n}: n is the number of columns of the result, and equals that of the operand x."""
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Add(Operation):
    """Computes a + b, of equal shapes."""

    name = "add"

    a: Rows
    b: Rows

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out` and of b: as many as a has."""
        return {"out": self.a.width, "b": self.a.width}


@dataclass(frozen=True, slots=True)
class ScaleRows(Operation):
    """Multiplies x by a constant, and by a stored number where there is a factor; with a limit the products are kept
    within it as limit * tanh(product / limit). Overwrites x."""

    name = "scale"

    x: Rows
    by: float
    _: KW_ONLY
    limit: float = 0.0
    factor: Vector | None = None

    @property
    def in_place(self) -> bool:
        """Whether the operation overwrites its operand x: always True."""
        return True

    def widths(self) -> Widths:
        """Returns {"out": n, "factor": 1}: n is the number of columns of the result, and equals that of the operand x;
        the factor has one element.
        """
        return {"out": self.x.width, "factor": 1}


@dataclass(frozen=True, slots=True)
class TemperRows(Operation):
    """Multiplies x by 1 + beta * log(1 + floor((position + shift) / every)); overwrites x."""

    name = "temper"
    reads_step = True

    x: Rows
    beta: float
    every: int
    shift: int = 0

    @property
    def in_place(self) -> bool:
        """Whether the operation overwrites its operand x: always True."""
        return True

    def widths(self) -> Widths:
        """Returns {"out": n}: n is the number of columns of the result, and equals that of the operand x."""
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Greatest(Operation):
    """Finds the greatest of each row's columns -> [T, 1]."""

    name = "greatest"

    x: Rows

    def widths(self) -> Widths:
        """Returns {"out": 1}: the result has one column."""
        return {"out": 1}


@dataclass(frozen=True, slots=True)
class Select(Operation):
    """Copies the rows of x whose logits are wanted -> [outputs, hidden]."""

    name = "select"
    reads_step = True
    selects = True

    x: Rows

    def widths(self) -> Widths:
        """Returns {"out": n}: n is the number of columns of the result, and equals that of the operand x."""
        return {"out": self.x.width}


@dataclass(frozen=True, slots=True)
class Summary(Operation):
    """Computes the summary of each row of logits that the sampler reads; see kt_program_summary for the exact rule."""

    name = "summary"
    outs = ("best", "peaks", "sums")

    logits: Rows

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the results: 1 for `best`, and one per block of 64 logits
        for `peaks` and `sums`.
        """
        blocks = -(-self.logits.width // BLOCK_COLUMNS)
        return {"best": 1, "peaks": blocks, "sums": blocks}
