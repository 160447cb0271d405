"""Windows of positions that become rows, in plain torch, f32; the rule is that of kt_program_pool.

Row by row, as the native engine does it. With one row per sequence nothing waits for the device; longer runs
launch a few kernels for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.layers.backend import PoolShape
from ktcli.layers.gpu.functions import Rows
from ktcli.layers.gpu.recurrent import States

# Of a growing softmax: greatest score, sum of powers, weighted sum, each [sequences, dim]; sum 0: of nothing yet.
Growing = tuple[Tensor, Tensor, Tensor]


def pool(
    x: Tensor, score: Tensor, rows: Rows, shape: PoolShape, states: States, first: int
) -> Tensor:
    """x and score [T, columns] -> [T, dim], a window's row where its last position is, else zeros.

    Args:
        score: with the bias of each row's place in its window.
        first: element of the state with which its part begins.
    """
    n, dim = states.slots.shape[1], shape.dim
    parts = 2 if shape.overlap else 1
    kept = states.read(first, (parts, 3, dim)).unbind(1)
    grown = [(each[:, 0], each[:, 1], each[:, 2]) for each in kept]
    is_last = ((rows.positions + 1) % shape.every == 0).view(n, -1, 1)
    values, scores = (
        torch.unflatten(y.view(n, -1, parts * dim), -1, (parts, dim)) for y in (x, score)
    )
    out = []
    for t in range(rows.run):
        # The second half belongs to the window that is open, the first to the next one.
        grown = [
            _push(each, values[:, t, parts - 1 - i], scores[:, t, parts - 1 - i])
            for i, each in enumerate(grown)
        ]
        last = is_last[:, t]
        out.append(torch.where(last, grown[0][2] / grown[0][1], 0.0))
        after = [*grown[1:], (torch.zeros_like(grown[0][0]),) * 3]
        grown = [
            tuple(torch.where(last, new, old) for new, old in zip(*pair, strict=True))
            for pair in zip(after, grown, strict=True)
        ]
    states.write(first, torch.stack([torch.stack(each, 1) for each in grown], 1))
    return torch.stack(out, 1).view(-1, dim)


def _push(grown: Growing, x: Tensor, score: Tensor) -> Growing:
    """One row more."""
    peak, total, mixed = grown
    top = torch.where(total > 0, torch.maximum(peak, score), score)
    keep, more = torch.where(total > 0, (peak - top).exp(), 0.0), (score - top).exp()
    return top, total * keep + more, mixed * keep + more * x
