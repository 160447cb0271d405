"""The interface of every engine, for chats, servers, evaluation and benchmarks.

An engine is a loaded model, on any device; `Session` is one timeline on it. There are two: `CpuEngine`,
and `DeviceEngine` (engine/device) with a GPU. Both follow a plan, and decide nothing themselves.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.draft_length import StepTimes
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
        """The number of positions that a session can hold."""

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights, on all devices."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The system's refusals and what they cost; a sentence each."""

    def session(self) -> Session:
        """Opens a new timeline; its cache is reserved now.

        Raises:
            NotEnoughMemory: other sessions have the cache.
        """

    def depth_at(self, position: int) -> int:
        """The number of experts that the token of an answer at `position` may defer."""

    @property
    def step_times(self) -> StepTimes | None:
        """The times of its decode steps by their rows; None: a row's logits depend on the rows beside it, so that
        drafts could change an answer."""

    def chunk_tokens(self, left: int) -> int:
        """The tokens of a prompt's next chunk when `left` are left, 1..left."""

    def chosen(self) -> NDArray[np.int64]:
        """The number of times that the routers chose each expert since the engine was made, [MoE layers, E]."""

    def operations(self) -> list[tuple[str, int]]:
        """The (operation of the CPU, nanoseconds so far) pairs, in the order in which they run."""


def depth_at(depths: tuple[tuple[int, int], ...], position: int) -> int:
    """The depth of deferral at a position, from (position, depth) pairs that hold from their position on."""
    return next(depth for start, depth in reversed(depths) if start <= position)
