"""The summary of a step's logits in two kernels: one for the blocks of columns, one for the best of their results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.native import BLOCK_COLUMNS
from ktcli.ops.triton.early import early, enter

_BLOCKS = 64  # blocks of one program


@triton.jit
def _blocks_kernel(
    logits, temperature, peaks, sums, highs, places, vocab, blocks,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Finds the peak and the sum of each of some blocks, and the highest logit of them all. Grid (groups, rows)."""
    enter(EARLY)
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = group * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
    peak = tl.max(tl.where(x != x, float("inf"), x), axis=1)
    degree = tl.load(temperature + row)
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    total = tl.sum(tl.exp((x - base[:, None]) / tl.maximum(degree, 1e-30)), axis=1)
    there = block < blocks
    tl.store(peaks + row * blocks + block, peak, mask=there)
    tl.store(sums + row * blocks + block, tl.where(degree > 0, total, 0.0), mask=there)
    high = tl.max(peak, axis=0)
    is_high = (tl.where(x != x, float("inf"), x) == high) & (column < vocab)
    place = tl.min(tl.min(tl.where(is_high, column, vocab), axis=1), axis=0)
    at = row * tl.num_programs(0) + group
    tl.store(highs + at, high)
    tl.store(places + at, place)


@triton.jit
def _best_kernel(highs, places, best, groups, vocab, GROUPS: tl.constexpr, EARLY: tl.constexpr):
    """Finds the place of the highest logit, the first of equals. Grid (rows,)."""
    enter(EARLY)
    row, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    there = group < groups
    high = tl.load(highs + row * groups + group, mask=there, other=float("-inf"))
    place = tl.load(places + row * groups + group, mask=there, other=vocab)
    is_best = (high == tl.max(high, axis=0)) & there
    found = tl.min(tl.where(is_best, place, vocab), axis=0)
    tl.store(best + row, found.to(tl.int64))


def summarize(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summary of logits [B, vocab] that the sampler reads: the index of each row's highest logit, int64
    [B], and the peak and the sum of each block, f32 [B, blocks], see `functions.summarize`; NaN counts as infinite.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK_COLUMNS)
    groups = -(-blocks // _BLOCKS)
    peaks, sums = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))
    highs = torch.empty(rows, groups, device=logits.device)
    places = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _blocks_kernel[(groups, rows)](
        logits, temperature, peaks, sums, highs, places, vocab, blocks,
        BLOCKS=_BLOCKS, COLUMNS=BLOCK_COLUMNS, **early(logits),
    )  # fmt: skip
    _best_kernel[(rows,)](
        highs,
        places,
        best,
        groups,
        vocab,
        GROUPS=max(2, triton.next_power_of_2(groups)),
        **early(logits),
    )
    return best, peaks, sums
