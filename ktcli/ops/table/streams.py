"""Rows of the table for hyper-connections, a residual of several parallel streams."""

from ktcli.ops.operation import Implied, Operation, Rows, Vector, Widths
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class MixShape:
    """The sizes and constants of hyper-connections, a residual of several streams; see kt_program_mix for the exact
    rule.

    Attributes:
        streams: the number of streams, side by side in a row of the residual.
        iterations: the number of times that rows and columns are divided by their sums.
        eps: the number added to divisors and to weights.
    """

    streams: int
    iterations: int
    eps: float

    @property
    def weights(self) -> int:
        """The number of mixing weights of a token in hyper-connections: one for entering and one for leaving each
        stream, and one for each pair of streams.
        """
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class SpreadStreams(Operation):
    """Copies x into each stream: [T, width] -> [T, streams * width]."""

    name = "spread"

    x: Rows
    streams: Implied

    def widths(self) -> Widths:
        """Returns {"out": n}: n is the number of columns of the result, `streams` times that of the operand x."""
        return {"out": self.streams * self.x.width}


@dataclass(frozen=True, slots=True)
class Mix(Operation):
    """Computes the weights of the streams [T, weights], or of entry alone [T, streams], from logits; overwrites x.

    scale is [3], or [1]; base has a value for each column."""

    name = "mix"
    outs = ()
    overwrites = ("x",)

    x: Rows
    scale: Vector
    base: Vector
    shape: MixShape

    def widths(self) -> Widths:
        """Returns, by field name, the number of columns of x, and the numbers of elements of scale and base."""
        alone = self.x.width == self.shape.streams
        columns = self.shape.streams if alone else self.shape.weights
        return {"x": columns, "scale": 1 if alone else 3, "base": columns}


@dataclass(frozen=True, slots=True)
class Collapse(Operation):
    """Adds up the streams of x, weighted by the columns of `by` -> [T, width]."""

    name = "collapse"

    x: Rows
    by: Rows

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, which is one stream wide, and of x, which
        holds all streams.
        """
        width = self.x.width // self.by.width
        return {"out": width, "x": self.by.width * width}


@dataclass(frozen=True, slots=True)
class Expand(Operation):
    """Computes the next streams: mixes those of x and adds to each its share of y; `by` is [T, streams +
    streams^2]."""

    name = "expand"

    x: Rows
    y: Rows
    by: Rows

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, of x, which holds all streams, and of the
        weights `by`.
        """
        streams = self.x.width // self.y.width
        by = streams * (1 + streams)
        return {"out": self.x.width, "x": streams * self.y.width, "by": by}
