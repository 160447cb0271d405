"""Gates on what the heads of an attention mix, by a projection that reads what q does."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.ops.table.rowwise import GateKind


@dataclass(frozen=True, slots=True)
class OwnGates:
    """Gates by a projection of their own.

    Attributes:
        source: checkpoint name of the projection, below the attention.
        kind: what of them multiplies.
        per_column: each column of a head has one; else each head.
    """

    source: str
    kind: GateKind = GateKind.SIGMOID
    per_column: bool = False

    def width(self, heads: int, columns: int) -> int:
        """Their number, for `heads` heads of `columns` columns."""
        return heads * (columns if self.per_column else 1)


@dataclass(frozen=True, slots=True)
class QueryGates:
    """A gate for each column, in the projection of the queries: each head there has its query and then its gates
    (Qwen3-Next)."""

    kind: GateKind = GateKind.SIGMOID

    def width(self, heads: int, columns: int) -> int:
        """Their number, for `heads` heads of `columns` columns."""
        return heads * columns
