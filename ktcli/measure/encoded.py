"""The tensors of a checkpoint, encoded as they are loaded: a layer can be run while the checkpoint is converted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ktcli.native import Pool, Weight
from ktcli.ops.native import Loaded
from ktcli.ops.tensors import Tensor
from ktcli.planner.slices import Slice
from ktcli.weights.encode import Encoder
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Reader


class EncodedSource:
    """A source of the tensors of a checkpoint in the formats of a recipe, for a pool of one node."""

    def __init__(self, checkpoint: Reader, recipe: Recipe, pool: Pool) -> None:
        assert len(pool.node_threads) == 1, "slices of nodes are read from packs"
        self.recipe, self.pool = recipe, pool
        self.identity = checkpoint.digest
        self._encoder = Encoder(checkpoint, recipe, pool)

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        """Encodes a tensor into `memory`.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for its format, or a file cannot be read.
        """
        for part in self._encoder.encode([tensor]):
            data = part.reshape(-1).view(np.uint8)
            memory[offset : offset + data.size] = data
            offset += data.size

    def place(
        self,
        tensor: Tensor,
        whole: Weight,
        slices: Sequence[Slice],
        targets: Sequence[Weight],
        offset: int = 0,
    ) -> None:
        """Is never called: one node has no slices."""
        raise AssertionError(tensor.name)
