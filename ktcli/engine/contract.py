"""What every engine is to those who use one: chats, servers, evaluation and benchmarks.

An engine is a loaded model, on whatever it runs; `Session` is one timeline on it. There are two: `CpuEngine`,
and `DeviceEngine` (engine/device) with a GPU. Both follow a plan, and decide nothing themselves.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.session import Session
from ktcli.models import Model, Spec
from ktcli.native import Pool
from ktcli.weights.recipe import Recipe


class Engine(Protocol):
    """A loaded model: ids in, logits out."""

    @property
    def model(self) -> Model:
        """The family's layers and tensors."""

    @property
    def recipe(self) -> Recipe:
        """The number formats of its weights."""

    @property
    def spec(self) -> Spec:
        """The model's shape."""

    @property
    def pool(self) -> Pool:
        """The teams that run the CPU's part."""

    @property
    def context(self) -> int:
        """Positions that a session can hold."""

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights, wherever they lie."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the system refused, and what that costs; a sentence each."""

    def session(self) -> Session:
        """A new timeline; its cache is reserved now.

        Raises:
            NotEnoughMemory: other sessions have the cache.
        """

    def depth_at(self, position: int) -> int:
        """How many experts the token of an answer at `position` may defer."""

    def chunk_tokens(self, left: int) -> int:
        """Tokens of a prompt's next chunk when `left` are left, 1..left."""

    def chosen(self) -> NDArray[np.int64]:
        """How often the routers chose each expert since the engine was made, [MoE layers, E]."""

    def operations(self) -> list[tuple[str, int]]:
        """(operation of the CPU, nanoseconds so far), in the order in which they run."""


def depth_at(depths: tuple[tuple[int, int], ...], position: int) -> int:
    """The depth of deferral at a position, of (position, depth) that say from where on which one counts."""
    return next(depth for start, depth in reversed(depths) if start <= position)
