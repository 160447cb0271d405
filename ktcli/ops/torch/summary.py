"""The summary of a step's logits by blocks of columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ktcli.native import BLOCK_COLUMNS

# (logits, temperature) -> best, peaks, sums
Summarize = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def summarize(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the summary of logits [B, vocab] that the sampler reads, each row at its temperature [B].

    Returns:
        best [B], the place of the highest logit; peaks and sums [B, blocks], see `Logits`. Sums are 0 at temperature 0.
    """
    vocab = logits.shape[1]
    short = -vocab % BLOCK_COLUMNS
    padded = torch.nn.functional.pad(logits, (0, short), value=-torch.inf)
    blocks = padded.view(logits.shape[0], -1, BLOCK_COLUMNS)
    peaks = blocks.amax(2)
    base = torch.where(peaks.isfinite(), peaks, 0.0)
    divisor = temperature.clamp_min(1e-30)[:, None, None]
    weights = ((blocks - base[:, :, None]) / divisor).exp()
    sums = torch.where(temperature[:, None] > 0, weights.sum(2), 0.0)
    return logits.argmax(1), torch.where(peaks.isnan(), torch.inf, peaks), sums
