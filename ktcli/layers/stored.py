"""How a part of a layer declares its stored tensors: their names, and the checkpoint's pieces that they are made of.

A stored name is "layers.3.attn.q_norm": the layer, the part's kind, and the part's own name of the tensor. A piece is
named below the part's prefix in the checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from ktcli.ops.part import ModelPart
from ktcli.ops.state import Projections
from ktcli.ops.tensors import Role, Stored, Tensor, ceil_to, matrix, vector

_STATE_LINE = 16  # f32 elements; a part of the state begins at a multiple of them


class StoredPart:
    """A part of a layer that attends, with the rules by which its stored tensors are named.

    Class attributes:
        KIND: the kind of the part in stored names.
        PART: the part of the model that its projections are counted under.
    """

    __slots__ = ()

    KIND: ClassVar[str] = "attn"
    PART: ClassVar[ModelPart] = ModelPart.ATTENTION

    @property
    @abstractmethod
    def layer(self) -> int:
        """The number of the decoder layer that the part belongs to."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The prefix of the names of the part's tensors in the checkpoint."""

    def _named(self, name: str) -> str:
        return f"layers.{self.layer}.{self.KIND}.{name}"

    def _matrix(
        self, name: str, k: int, *pieces: tuple[str, int], role: Role = Role.DENSE
    ) -> Tensor:
        """A projection of k columns: weights of so many rows each, one below the other."""
        stored = (Stored(f"{self.source}.{of}.weight", (rows, k)) for of, rows in pieces)
        return self._projection(name, *stored, role=role)

    def _projection(self, name: str, *stored: Stored, role: Role = Role.DENSE) -> Tensor:
        return matrix(
            self._named(name), *stored, layer=self.layer, part=self._counted(role), role=role
        )

    def _counted(self, role: Role) -> ModelPart:
        """The part of the model that a projection is counted under."""
        return self.PART

    def _vector(
        self, name: str, *pieces: tuple[str, int], plus: float = 0.0, neutral: float = 1.0
    ) -> Tensor:
        """A vector of pieces of so many elements each, one behind the other."""
        stored = (Stored(f"{self.source}.{of}", (length,), plus=plus) for of, length in pieces)
        return vector(self._named(name), *stored, layer=self.layer, neutral=neutral)


class LinearPart(StoredPart, Projections):
    """A part with a state of a fixed size in place of every position; projections of its gates are kept exact."""

    __slots__ = ()

    PART = ModelPart.LINEAR

    def _counted(self, role: Role) -> ModelPart:
        return self.PART if role is Role.DENSE else ModelPart.LINEAR_GATES

    def _taps(self, name: str, of: str, columns: int, width: int) -> Tensor:
        """The weight of a causal convolution that reads `width` rows of so many columns: row by row, the oldest
        first."""
        stored = Stored(f"{self.source}.{of}.weight", (columns, 1, width), transposed=True)
        return vector(self._named(name), stored, layer=self.layer)


def by_head(stored: Stored, *parts: int) -> list[tuple[Stored, ...]]:
    """Splits a stacked projection in which each head has parts[0] rows of a first part, then parts[1] rows of a second,
    and so on; returns for each part the pieces with its rows, one for each head."""
    starts = range(0, stored.rows, sum(parts))
    return [
        tuple(replace(stored, first=at + sum(parts[:i]), count=count) for at in starts)
        for i, count in enumerate(parts)
    ]


def conv_elements(columns: int, width: int) -> int:
    """Returns the number of f32 elements of the state of a causal convolution: the last width - 1 rows of `columns`
    columns, rounded up to a multiple of 16."""
    return ceil_to((width - 1) * columns, _STATE_LINE)
