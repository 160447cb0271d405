"""Gates on the outputs of attention heads, by a projection that reads the same input as q."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.ops.table.rowwise import GateKind


@dataclass(frozen=True, slots=True)
class OwnGates:
    """Gates on the heads' outputs, computed by a projection of their own.

    Attributes:
        source: checkpoint name of the projection, below the attention.
        kind: the function of a gate's score that the output is multiplied with.
        per_column: whether each column of a head has a gate; otherwise each head has one.
    """

    source: str
    kind: GateKind = GateKind.SIGMOID
    per_column: bool = False

    def width(self, heads: int, columns: int) -> int:
        """Returns the number of gates that `heads` heads of `columns` columns have."""
        return heads * (columns if self.per_column else 1)


@dataclass(frozen=True, slots=True)
class QueryGates:
    """Gates on each column of the heads' outputs, computed by the projection of the queries: each head there has
    its query and then its gates (Qwen3-Next)."""

    kind: GateKind = GateKind.SIGMOID

    def width(self, heads: int, columns: int) -> int:
        """Returns the number of gates that `heads` heads of `columns` columns have."""
        return heads * columns
