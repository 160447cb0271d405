"""The tensors of a checkpoint, encoded as they are loaded: a layer can be run while the checkpoint is converted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.loader import Shares
from ktcli.native import Arena, Pool, Weight
from ktcli.ops.native import Loaded
from ktcli.ops.tensors import Tensor
from ktcli.weights.encode import Encoder
from ktcli.weights.recipe import Recipe
from ktcli.weights.storage import Reader


class EncodedSource:
    """A source of the tensors of a checkpoint in the formats of a recipe, for a pool of one node."""

    def __init__(
        self, checkpoint: Reader, recipe: Recipe, pool: Pool, least_bytes: int = 0
    ) -> None:
        """Makes a source whose memory has at least `least_bytes` bytes from the first call of `arena` on."""
        assert len(pool.node_threads) == 1, "slices of nodes are read from packs"
        self.recipe, self.pool = recipe, pool
        self.identity = checkpoint.digest
        self._encoder = Encoder(checkpoint, recipe, pool)
        self._arenas: dict[int | None, Arena] = {}
        self._least_bytes = least_bytes

    def arena(self, size_bytes: int, node: int | None = None) -> Arena:
        """Returns memory on a NUMA node for at least `size_bytes` bytes of tensors; memory of an earlier call is reused
        if it is large enough; its tensors must not be in use any more."""
        found = self._arenas.pop(node, None)
        if found is None or found.size_bytes < size_bytes:
            del found  # given back first
            found = self.pool.arena(max(size_bytes, self._least_bytes), node)
        self._arenas[node] = found
        return found

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        """Encodes a tensor of the checkpoint into `memory`, from byte `offset` on.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for its format, or a file cannot be read.
        """
        self._encoder.encode_into(tensor, memory[offset:])

    def place(self, tensor: Tensor, whole: Weight, shares: Shares, offset: int = 0) -> None:
        """Raises AssertionError: it must not be called, as a pool of one NUMA node has no slices of tensors."""
        raise AssertionError(tensor.name)
