"""Pooling of windows of positions into rows, in plain torch, f32; the rule is that of kt_program_pooling.

All rows of a step are pooled at once: they are laid out by window, of which the first and the last may be partial. The
state, which has the positions before the step, joins the first window, and the last one becomes the new state. No shape
depends on where a step begins, so nothing waits for the device.

A partial softmax is [..., 3, dim] here: the greatest score, the sum of powers, and the weighted sum, for each column;
zeros as long as there is no score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.ops.table.recurrent import PoolShape
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.recurrent import States


def pooling(
    x: Tensor, score: Tensor, bias: Tensor, shape: PoolShape, *, rows: Rows, state: States
) -> Tensor:
    """Returns rows [T, dim]: where a row is the last position of a window, the values x [T, columns] of that window
    averaged with the softmax of `score` [T, columns] as weights, else zeros. Updates the state.

    bias: [every * columns], added to the scores of each place in a window.
    """
    n, every, overlap = state.slots.shape[1], shape.every, shape.overlap
    score = score + bias.view(every, -1)[rows.positions % every]
    positions = rows.positions.view(n, -1)
    # From the beginning of the first window on.
    places = positions[:, :1] % every + torch.arange(rows.run, device=x.device)
    grown = _by_window(x, score, places, shape)  # [n, windows, parts, 3, dim]
    held = state.read((1 + overlap, 3, shape.dim))
    grown = torch.cat((_joined(held, grown[:, 0])[:, None], grown[:, 1:]), 1)
    done = grown[:, :, 0]
    if overlap:  # a window has its own rows, and what those of the one before gave it
        before = torch.cat((torch.zeros_like(done[:, :1]), grown[:, :-1, 1]), 1)
        done = _joined(before, done)
    sequence = torch.arange(n, device=x.device)
    is_last = (positions + 1) % every == 0
    last = sequence, places[:, -1] // every
    after = torch.stack((done[last], grown[last][:, 1]), 1) if overlap else done[last][:, None]
    # The next one is open now.
    emptied = torch.cat((after[:, 1:], torch.zeros_like(after[:, :1])), 1)
    state.write(torch.where(is_last[:, -1, None, None, None], emptied, after))
    _, total, mixed = done[sequence[:, None], places // every].unbind(-2)  # [n, run, dim]
    return torch.where(is_last[..., None], mixed / total, 0.0).view(-1, shape.dim)


def _by_window(x: Tensor, score: Tensor, places: Tensor, shape: PoolShape) -> Tensor:
    """Returns [n, windows, parts, 3, dim], the partial softmaxes of each window's rows alone: its own, and what they
    give the next window."""
    n, every, columns = len(places), shape.every, shape.columns
    windows = -(-(places.shape[1] - 1) // every) + 1  # at most

    def laid_out(rows: Tensor, empty: float) -> Tensor:
        grid = rows.new_full((n, windows * every, columns), empty)
        grid.scatter_(1, places[..., None].expand(-1, -1, columns), rows.view(n, -1, columns))
        # The second half of the columns belongs to the window itself, the first to the next one.
        return grid.view(n, windows, every, -1, shape.dim).flip(3)

    values, scores = laid_out(x, 0.0), laid_out(score, float("-inf"))
    peak = scores.amax(2)
    power = (scores - peak[:, :, None]).exp().masked_fill(scores.isneginf(), 0.0)
    return torch.stack((peak, power.sum(2), (power * values).sum(2)), -2)


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Joins two partial softmaxes [..., 3, dim]."""
    peaks = [x[..., 0, :].masked_fill(x[..., 1, :] == 0, float("-inf")) for x in (a, b)]
    top = torch.maximum(*peaks)
    # -inf minus -inf is NaN, and the sums are 0 there.
    shares = [torch.where(peak == top, 1.0, (peak - top).exp())[..., None, :] for peak in peaks]
    return torch.cat((top[..., None, :], shares[0] * a[..., 1:, :] + shares[1] * b[..., 1:, :]), -2)
