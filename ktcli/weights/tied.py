"""Finds an output head that config.json ties to the embedding although the checkpoint has a separate tensor for it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ktcli.native import Pool
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Tensor
from ktcli.weights.storage import Reader, StorageSource, read_rows


def remark(tensors: Iterable[Tensor], checkpoint: Reader, pool: Pool) -> str | None:
    """Returns a sentence for the user about a tied head with weights of its own; None: there is none, or they are
    equal.

    Raises:
        BadCheckpoint: a file cannot be read.
    """
    heads = [
        tensor for tensor in tensors if tensor.part is ModelPart.HEAD and len(tensor.sources) > 1
    ]
    for head in heads:
        names = [piece.name for pieces in head.sources for piece in pieces]
        if not all(name in checkpoint.names for name in names):
            continue
        first, second = (checkpoint.find(name, head.sources[0][0].shape) for name in names)
        if _differ(first, second, checkpoint, pool):
            return (
                f"config.json says tie_word_embeddings, but {first.name} differs from {second.name}; "
                "both are stored"
            )
    return None


def _differ(first: StorageSource, second: StorageSource, checkpoint: Reader, pool: Pool) -> bool:
    """Returns whether any number differs; reading ends at the first piece in which one does."""
    pieces = zip(*(read_rows(each, checkpoint, pool) for each in (first, second)), strict=True)
    return any(not np.array_equal(ours, theirs) for (_, ours), (_, theirs) in pieces)
