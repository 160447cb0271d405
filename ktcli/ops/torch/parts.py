"""Sums that have not been computed yet: of the parts of a split product, or of the experts of a token.

Taking one is a launch of its own, unless the operation that reads the sum takes it along.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Parts:
    """A sum of parts for each row, not yet added up.

    Attributes:
        values: [T, P, N] f32; neighbouring columns lie side by side.
        routed: ids int32 [T, P], slots int32 [experts] and gates f32 [T, P]: the parts are those of chosen experts, of
            which those in a slot count, times their gates; None: each part counts as it is.
        beside: [T, N] or [N] f32, one more part; None: there is none.
    """

    values: Tensor
    routed: tuple[Tensor, Tensor, Tensor] | None = None
    beside: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor) -> Parts:
        """Returns the rows x [T, N] as a sum of one part."""
        return cls(x[:, None])

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns of the sum."""
        return self.values.shape[0], self.values.shape[2]

    @property
    def alone(self) -> Tensor | None:
        """The rows [T, N] where the sum has only one part, without a gate; else None."""
        if self.values.shape[1] > 1 or self.routed is not None or self.beside is not None:
            return None
        return self.values[:, 0]

    def columns(self, first: int, last: int) -> Parts:
        """Returns the sum of columns [first, last) only."""
        beside = None if self.beside is None else self.beside[..., first:last]
        return replace(self, values=self.values[..., first:last], beside=beside)
