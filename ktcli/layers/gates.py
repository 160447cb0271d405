"""Gates on what the heads of an attention mix, by a projection of their own, which reads what q does."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.ops.table.rowwise import GateKind


@dataclass(frozen=True, slots=True)
class OwnGates:
    """Gates by a projection of their own, on what the heads attend to.

    Attributes:
        source: checkpoint name of the projection, below the attention.
        kind: what of them multiplies.
        per_column: each column of a head has one; else each head.
    """

    source: str
    kind: GateKind = GateKind.SIGMOID
    per_column: bool = False

    def width(self, heads: int, columns: int) -> int:
        """How many there are, for heads of so many columns."""
        return heads * (columns if self.per_column else 1)
