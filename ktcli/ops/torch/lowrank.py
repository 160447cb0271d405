"""Updates of low rank beside the products of a device: y += (x Aᵀ) Bᵀ, from buffers that stay where they are.

Whose values they have changes between steps: those of one adapter, its scale within B, or zeros. So a captured step has
the updates of whichever adapter it is replayed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.native import PANEL_ROWS, Update
from ktcli.native.library import require
from ktcli.records import dataclass

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The update of one product.

    Attributes:
        a: f32 [R, k]. b: f32 [n, R]. Of one matrix per head there are as many before them, or one for all heads.
    """

    a: Tensor
    b: Tensor

    def added(self, y: Tensor | None, x: Tensor) -> Tensor:
        """Returns y [T, n] or [n] f32 plus the low-rank update (x a^T) b^T of the rows x [T, k], [T, n]; y None: the
        update alone.
        """
        inner = x.float() @ self.a.T
        return inner @ self.b.T if y is None else torch.addmm(y, inner, self.b.T)

    def of_heads(self, x: Tensor) -> Tensor:
        """Returns the low-rank update of each head's product, [T, heads, n]; x is [T, heads, k], or [T, k] if all heads
        have the same rows.
        """
        rows = x.float() if x.dim() == 2 else x.float().transpose(0, 1)
        inner = rows @ self.a.transpose(1, 2)
        return (inner @ self.b.transpose(1, 2)).transpose(0, 1)

    def heads(self, which: slice) -> Self:
        """Returns the low-rank update restricted to the heads in the slice `which`, as views of its factors."""
        a, b = (each if each.shape[0] == 1 else each[which] for each in (self.a, self.b))
        return type(self)(a, b)


def write_factors(updates: Sequence[Update], a: F32, b: F32) -> None:
    """Overwrites a and b with the factors of one product's low-rank updates, concatenated along the rank; unused ranks
    are set to zero.

    Args:
        a: [1 or count, R, k]. b: [1 or count, n, R], with the scale of each update. count: matrices; R: ranks; k, n:
            inputs and outputs of a matrix.
    Raises:
        NativeError: the updates have more ranks than a and b have room for, or another number of matrices.
    """
    k, n, first = a.shape[2], b.shape[1], 0
    panels = -(-n // PANEL_ROWS)
    tall = np.zeros((len(b), panels, PANEL_ROWS, b.shape[2]), np.float32)
    a[:] = 0
    for each in updates:
        ranks = slice(first, first + each.rank)
        room = (
            ranks.stop <= a.shape[1] and len(each.a) in (1, len(a)) and len(each.b) in (1, len(b))
        )
        require(room, f"an update of rank {each.rank} in buffers {a.shape} and {b.shape}")
        a[:, ranks] = _values(each.a)[:, :, :k]
        changed = slice(each.first_panel, panels, each.panel_step)
        of_panels = _values(each.b).transpose(0, 1, 3, 2) * np.float32(each.scale)
        tall[:, changed, :, ranks][:, : of_panels.shape[1]] = of_panels
        first = ranks.stop
    b[:] = tall.reshape(len(b), -1, b.shape[2])[:, :n]


def _values(factor: NDArray[Any]) -> F32:
    """The values of a factor that is f32, or bf16 as bits."""
    if factor.dtype == np.float32:
        return factor
    return (factor.astype(np.uint32) << 16).view(np.float32)
