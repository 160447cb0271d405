"""The loss of a step: cross entropy of its trained positions, and its gradient at the residual before the head.

Logits are computed for a few rows at a time: T x vocab of them never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ktcli.training.documents import Documents

# Logits that exist at once: 64 MiB, and as much again twice for their gradient.
CHUNK_ELEMENTS = 1 << 24

Head = Callable[[Tensor], Tensor]  # the residual of some rows [N, H] -> their logits [N, vocab]


def chunk_rows(vocab: int) -> int:
    """Returns the number of rows (tokens) whose logits, `vocab` each, are computed at once: as many as CHUNK_ELEMENTS
    hold, at least one.
    """
    return max(1, CHUNK_ELEMENTS // vocab)


def token_loss(head: Head, x: Tensor, documents: Documents, vocab: int) -> tuple[float, Tensor]:
    """Returns the mean cross entropy of the trained positions of a step, in nats, and its gradient [T, H] with respect
    to x [T, H], the residual behind the last layer.

    Every trained token counts the same, whatever document it is in.
    """
    n, step = len(documents.rows), chunk_rows(vocab)
    dx, total = torch.zeros_like(x), 0.0
    for rows, labels in _chunks(documents, step):
        some = x.index_select(0, rows).detach().requires_grad_()
        with torch.enable_grad():
            losses = cross_entropy(head(some), labels, reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum() / n, some)
        dx[rows] = gradient
        total += float(losses.detach().double().sum())
    return total / n, dx


def mean_loss(head: Head, x: Tensor, documents: Documents, vocab: int) -> float:
    """Returns the mean cross entropy of the trained positions of a step, in nats, from x [T, H], the residual behind
    the last layer.
    """
    step = chunk_rows(vocab)
    total = 0.0
    for rows, labels in _chunks(documents, step):
        losses = cross_entropy(head(x.index_select(0, rows)), labels, reduction="none")
        total += float(losses.double().sum())
    return total / len(documents.rows)


def _chunks(documents: Documents, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the trained rows and their labels, `step` at a time."""
    for first in range(0, len(documents.rows), step):
        some = slice(first, first + step)
        yield documents.rows[some], documents.labels[some]
