"""Rows of the table: hyper-connections, a residual of several streams side by side."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.ops.operation import Implied, Operation, Rows, Vector, Widths


@dataclass(frozen=True, slots=True)
class MixShape:
    """Hyper-connections: a residual of several streams; see kt_program_mix for the exact rule.

    Attributes:
        streams: side by side in a row of the residual.
        iterations: of the division of rows and columns by their sums.
        eps: added to what is divided by, and to weights.
    """

    streams: int
    iterations: int
    eps: float

    @property
    def weights(self) -> int:
        """Weights of a token: those of entry, of leaving, and of streams among each other."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class SpreadStreams(Operation):
    """[T, width] -> [T, streams * width], each stream the same."""

    name = "spread"

    x: Rows
    streams: Implied

    def widths(self) -> Widths:
        return {"out": self.streams * self.x.width}


@dataclass(frozen=True, slots=True)
class Mix(Operation):
    """Weights of the streams [T, weights], or of entry alone [T, streams], from as many columns; overwrites x.

    scale: [3], or [1]; base: as many as columns."""

    name = "mix"
    outs = ()
    overwrites = ("x",)

    x: Rows
    scale: Vector
    base: Vector
    shape: MixShape

    def widths(self) -> Widths:
        alone = self.x.width == self.shape.streams
        columns = self.shape.streams if alone else self.shape.weights
        return {"x": columns, "scale": 1 if alone else 3, "base": columns}


@dataclass(frozen=True, slots=True)
class Collapse(Operation):
    """The sum of the streams of x, weighted by the columns of `by` -> [T, width]."""

    name = "collapse"

    x: Rows
    by: Rows

    def widths(self) -> Widths:
        width = self.x.width // self.by.width
        return {"out": width, "x": self.by.width * width}


@dataclass(frozen=True, slots=True)
class Expand(Operation):
    """The streams of x, mixed among each other, each with its share of y. by: [T, streams + streams^2]."""

    name = "expand"

    x: Rows
    y: Rows
    by: Rows

    def widths(self) -> Widths:
        streams = self.x.width // self.y.width
        by = streams * (1 + streams)
        return {"out": self.x.width, "x": streams * self.y.width, "by": by}
