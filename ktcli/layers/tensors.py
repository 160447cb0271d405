"""What a model stores: the tensors of each layer, once, for everybody.

The parts of a model (attention, experts, norms …) declare their tensors here. Conversion reads the
declarations to know what to take from a checkpoint, the planner to count bytes, the loader to know what
to expect in a pack, the benchmark to make random weights, and the forward to name its operands. There
is no second list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

F32Array = NDArray[np.float32]


class Role(Enum):
    """Decides a tensor's number format, through the recipe of a conversion."""

    EXPERTS = "experts"  # routed experts: the recipe's --experts format
    DENSE = "dense"  # attention projections, dense MLP, shared experts, lm_head: --dense
    KEPT = "kept"  # stays bf16, packed: router, MLA's kv_b
    TABLE = "table"  # stays bf16, plain row-major rows: the embedding
    VECTOR = "vector"  # stays f32, plain: norms, biases


class Cut(Enum):
    """How NUMA nodes share a tensor's matrices."""

    NONE = "none"  # not: its pages lie on all nodes in turn
    ROWS = "rows"  # each node gives some outputs
    COLUMNS = "columns"  # each node has some inputs; what they give is added up


# join(arrays, index) -> matrix [n, k]: makes matrix `index` of a tensor from its checkpoint arrays.
Join = Callable[[Sequence[F32Array], int], F32Array]


def stack_rows(arrays: Sequence[F32Array], index: int) -> F32Array:
    """The arrays' rows, one array behind the other; one array passes through."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: `count` matrices [n, k] of one shape (vectors: n = 1, k = length).

    Attributes:
        name: unique in the model, e.g. "layers.3.attn.qkv"; the pack uses it too.
        n, k: outputs and inputs of each matrix.
        role: decides the number format.
        sources: checkpoint names; "{e}" is replaced by the matrix index.
        count: number of matrices: experts, or heads for MLA's split kv_b.
        alternate: two sources [n/2', k] whose 16-row panels alternate (gate and up); n = 2 * ceil16(I),
            each source padded with zero rows to a multiple of 16.
        join: how the sources become matrix `index`; unused when `alternate`.
        source_shapes: the shape each source must have in the checkpoint, checked before conversion starts.
        layer: the layer it belongs to; None for embedding, final norm and head.
        cut: how nodes share it. Experts are shared by width: gate and up by rows, down by columns.
    """

    name: str
    n: int
    k: int
    role: Role
    sources: tuple[str, ...]
    count: int = 1
    alternate: bool = False
    join: Join = field(default=stack_rows, compare=False)
    source_shapes: tuple[tuple[int, ...], ...] = ()
    layer: int | None = None
    cut: Cut = Cut.NONE

    @property
    def elements(self) -> int:
        return self.n * self.k * self.count

    def source_names(self, index: int) -> tuple[str, ...]:
        """Checkpoint names that make up matrix `index`."""
        return tuple(name.replace("{e}", str(index)) for name in self.sources)


def ceil_to(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple
