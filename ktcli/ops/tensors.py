"""Declares the tensors that each layer of a model stores, in one place for all users.

The parts of a model (attention, experts, norms …) declare their tensors here. Conversion reads the
declarations to know what to take from a checkpoint, the planner to count bytes, the loader to know what
to expect in a pack, the benchmark to make random weights, and the forward to name its operands. There
is no second list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from enum import Enum
from math import prod
from typing import NamedTuple

from ktcli.ops.part import Access, LayerPart, ModelPart
from ktcli.records import dataclass


class Role(Enum):
    """The role of a tensor, by which the recipe of a conversion chooses its number format."""

    EXPERTS = "experts"  # routed experts: the recipe's --experts format
    DENSE = "dense"  # attention projections, dense MLP, shared experts, lm_head: --dense
    KEPT = "kept"  # bf16 or f32 as the checkpoint has it, packed: router, MLA's kv_b
    TABLE = "table"  # the same, plain row-major rows: the embedding
    VECTOR = "vector"  # stays f32, plain: norms, biases


class Cut(Enum):
    """The way in which NUMA nodes share a tensor's matrices."""

    NONE = "none"  # not at all: its pages lie on all nodes in turn
    ROWS = "rows"  # each node computes some outputs
    COLUMNS = "columns"  # each node reads some inputs; their partial sums are added up


class Band(NamedTuple):
    """The place of each matrix in a two-dimensional tensor that holds many: matrix e is the `rows` rows from row e *
    stride + first on."""

    stride: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of a checkpoint tensor, or of each of its matrices, from which a tensor of the model is made.

    Attributes:
        name: its name in the checkpoint; "{e}" stands for the matrix index.
        shape: the shape of the whole checkpoint tensor, checked before conversion starts.
        matrix: whether the first dimension counts the matrices: [E, n, k] of fused experts, [E, n] of their biases.
        band: the place of the matrices if they lie one below the other in [rows, k], as the heads of MLA's kv_b do.
        transposed: whether each matrix lies as [k, n].
        first, step, count: rows first, first + step, … of the matrix, `count` of them (0: as many as there
            are): halves, or gate and up that interleave. In a vector they select elements.
        plus: the number added to every value of a vector, for norms whose gain is 1 + weight.
    """

    name: str
    shape: tuple[int, ...]
    matrix: bool = False
    band: Band | None = None
    transposed: bool = False
    first: int = 0
    step: int = 1
    count: int = 0
    plus: float = 0.0

    def at(self, index: int) -> str:
        """Returns the name that the checkpoint gives matrix `index` of this tensor: `name` with the index in place of
        "{e}".
        """
        return self.name.replace("{e}", str(index))

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of one matrix (or vector) of the checkpoint tensor, before it is transposed and rows are chosen."""
        if self.band:
            return (self.band.rows, *self.shape[1:])
        return self.shape[1:] if self.matrix else self.shape

    @property
    def rows(self) -> int:
        """The number of rows that are taken of each matrix of the checkpoint tensor; of a vector, the number of
        elements.
        """
        one = self.one
        height = prod(one[:-1]) if len(one) > 1 and not self.transposed else prod(one[-1:])
        return self.count or -(-(height - self.first) // self.step)

    @property
    def columns(self) -> int:
        """The number of columns of the rows that are taken of the checkpoint tensor; 1 for a vector."""
        if len(self.one) < 2:
            return 1
        return prod(self.one[:-1]) if self.transposed else self.one[-1]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: `count` matrices [n, k] of one shape (vectors: n = 1, k = length).

    Attributes:
        name: unique in the model, e.g. "layers.3.attn.qkv"; the pack uses it too. Nothing follows from it.
        n, k: outputs and inputs of each matrix.
        role: decides the number format.
        part: the part of the model that it is counted under.
        access: how a step reads it.
        sources: the pieces of a checkpoint that it is made of, whose rows lie one below the other. Where publishers
            name or lay out the same weights differently there are alternatives: the first whose names the checkpoint
            has is taken. A vector of no pieces, which may come last, is of zeros.
        count: number of matrices: experts, or heads for MLA's split kv_b; of vectors: experts.
        alternate: each alternative has two pieces, [I, k] each, whose 16-row panels alternate (gate and up);
            n = 2 * ceil16(I), each padded with zero rows to a multiple of 16. Of vectors: pieces [I], runs of
            16 elements, k = 2 * ceil16(I).
        layer: the layer it belongs to; None for embedding, final norm and head.
        cut: how nodes share it. Experts are shared by width: gate and up by rows, down by columns.
        below: if not 0, its values are integers in [0, below): ids of experts.
        gain: the vector that its input was just multiplied by, if nothing else reads that product: then a conversion
            may move factors of its columns into that vector, which comes later in the same file.
        neutral: the value of a vector's elements before anything was learned, as in a model of random weights: 1 for
            gains, 0 for biases.
    """

    name: str
    n: int
    k: int
    role: Role
    sources: tuple[tuple[Stored, ...], ...]
    count: int = 1
    alternate: bool = False
    layer: int | None = None
    cut: Cut = Cut.NONE
    below: int = 0
    gain: Tensor | None = None
    neutral: float = 1.0
    part: ModelPart = field(kw_only=True)
    access: Access = field(kw_only=True, default=Access.EVERY_TOKEN)

    @property
    def elements(self) -> int:
        """The number of elements of all `count` matrices of the tensor together."""
        return self.n * self.k * self.count

    @property
    def layer_part(self) -> LayerPart | None:
        """The decoder layer, and the part of it, that the tensor belongs to; None: it belongs to no layer."""
        return None if self.layer is None else LayerPart(self.layer, self.part)

    @property
    def is_expert_bias(self) -> bool:
        """Whether the tensor holds a bias vector for each routed expert."""
        return self.role is Role.VECTOR and self.access is Access.CHOSEN


def matrix(
    name: str,
    *pieces: Stored,
    layer: int | None,
    part: ModelPart,
    role: Role = Role.DENSE,
    cut: Cut = Cut.ROWS,
) -> Tensor:
    """Returns the declaration of a weight matrix with which every token is multiplied; its rows are those of the
    checkpoint pieces, one below the other.
    """
    n, k = sum(piece.rows for piece in pieces), pieces[0].columns
    return Tensor(name, n, k, role, (pieces,), layer=layer, cut=cut, part=part)


def kept_whole(name: str, *pieces: Stored, layer: int | None, part: ModelPart) -> Tensor:
    """Returns the declaration of a small weight matrix, such as a router, that keeps the checkpoint's number format and
    is not shared out among NUMA nodes; its rows are those of the checkpoint pieces.
    """
    return matrix(name, *pieces, layer=layer, part=part, role=Role.KEPT, cut=Cut.NONE)


def vector(
    name: str, *pieces: Stored, layer: int | None, neutral: float = 1.0, below: int = 0
) -> Tensor:
    """Returns the declaration of a vector with the elements of the checkpoint pieces, concatenated. If `below` is not
    0, they are a table of integers in [0, below), such as expert ids, of which each token reads one row.
    """
    length = sum(piece.rows * piece.columns for piece in pieces)
    return Tensor(
        name,
        1,
        length,
        Role.VECTOR,
        (pieces,),
        layer=layer,
        below=below,
        neutral=neutral,
        part=ModelPart.VECTORS,
        access=Access.ROWS if below else Access.ONCE,
    )


def counted(tensors: Iterable[Tensor]) -> tuple[tuple[Tensor, int], ...]:
    """Groups tensors that have the same size, role, part, access, `cut` and `below`; returns the first tensor of each
    group and the number of tensors in it, in order of first appearance.
    """
    found: dict[tuple[object, ...], tuple[Tensor, int]] = {}
    for each in tensors:
        key = each.n, each.k, each.count, each.role, each.part, each.access, each.cut, each.below
        first, number = found.get(key, (each, 0))
        found[key] = first, number + 1
    return tuple(found.values())


def ceil_to(value: int, multiple: int) -> int:
    """Returns `value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple
