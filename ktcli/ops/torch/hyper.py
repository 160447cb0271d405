"""Hyper-connections in plain torch, f32: a residual of parallel streams, mixed by weights of each token.

The rules are those of kt_program_spread, _mix, _collapse and _expand. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.ops.table.streams import MixShape


def spread(x: Tensor, streams: int) -> Tensor:
    """Returns x [T, width] repeated once for each residual stream, [T, streams * width]."""
    return x.repeat(1, streams)


def mix(x: Tensor, scale: Tensor, base: Tensor, shape: MixShape) -> Tensor:
    """Returns the mixing weights of hyper-connections from x: [T, streams], those of entering only, or [T, weights],
    also those of leaving and among streams. scale [1] or [3]: a factor for each of these kinds; base: as wide as x.
    """
    n, eps = shape.streams, shape.eps
    if x.shape[1] == n:
        return torch.sigmoid(x * scale + base) + eps
    parts = [n, n, n * n]
    pre, post, comb = (
        part * factor + offset
        for part, factor, offset in zip(
            torch.split(x, parts, -1), scale, torch.split(base, parts), strict=True
        )
    )
    comb = comb.view(-1, n, n).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(shape.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.cat((pre.sigmoid() + eps, 2 * post.sigmoid(), comb.flatten(1)), -1)


def collapse(x: Tensor, by: Tensor) -> Tensor:
    """Returns the sum [T, width] of the residual streams of x [T, streams * width], weighted by `by` [T, streams]."""
    return (torch.unflatten(x, -1, (by.shape[1], -1)) * by[..., None]).sum(1)


def expand(x: Tensor, y: Tensor, by: Tensor) -> Tensor:
    """Returns the mixed residual streams [T, streams * width] of x [T, streams * width] and y [T, width]: stream k is
    by[k] * y + the sum over streams j of by[streams + j * streams + k] * x[j].
    """
    streams = x.shape[1] // y.shape[1]
    post, comb = torch.split(by, [streams, streams**2], -1)
    # Element by element: a GPU would multiply matrices of f32 in a shorter format.
    weights = comb.view(-1, streams, streams, 1)
    mixed = (weights * torch.unflatten(x, -1, (streams, 1, -1))).sum(1)
    return (post[..., None] * y[:, None] + mixed).flatten(1)
