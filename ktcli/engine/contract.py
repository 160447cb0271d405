"""The interface of every engine, for chats, servers, evaluation and benchmarks.

An engine is a loaded model, on any device; a `Sequence` is one timeline on it, and a step runs a batch of runs of
several sequences. There are two: `CpuEngine`, and `DeviceEngine` (engine/device) with a GPU. Both follow a plan, and
decide nothing themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.adapters import Adapters
from ktcli.engine.draft_length import StepTimes
from ktcli.engine.logits import Logits
from ktcli.engine.pools import Pools
from ktcli.engine.sequence import Sequence
from ktcli.engine.session import Session
from ktcli.engine.stores import PageMemory
from ktcli.models import Model, Spec
from ktcli.native import Batch, Pool
from ktcli.ops.kvformat import CacheFormat
from ktcli.planner.cost import PieceTimes
from ktcli.weights.recipe import Recipe

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


class Engine(ABC):
    """A loaded model: ids in, logits out.

    Attributes:
        model: the model that is loaded: the family's layers and tensors.
        recipe: the number formats of its weights.
        spec: the sizes of the model.
        pool: the pool whose teams run the CPU's part.
        context: the number of positions that a sequence can have.
        max_tokens: the greatest number of tokens of a prompt's chunk.
        max_rows: the greatest number of rows of a step: a prompt's chunk and, where there is room, answers beside it.
        max_outputs: the greatest number of rows of a step that give logits.
        pools: the pools of the pages and states of its sequences.
        memory: the memory of the pages and states, which stores read and write.
        cache_format: the number format of its KV cache.
        weights_bytes: the bytes of the weights, on all devices.
        warnings: sentences for the user about requests that the system refused, and their cost.
        adapters: those that are attached; None: it was loaded without room for any.
    """

    model: Model
    recipe: Recipe
    spec: Spec
    pool: Pool
    context: int
    max_tokens: int
    max_rows: int
    max_outputs: int
    pools: Pools
    memory: PageMemory
    cache_format: CacheFormat
    weights_bytes: int
    warnings: tuple[str, ...]
    adapters: Adapters | None

    def sequence(self) -> Sequence:
        """Returns a new, empty sequence of token ids, which takes KV-cache pages as it grows; the caller closes it."""
        return Sequence(self.pools)

    def session(self) -> Session:
        """Returns a new session: an empty sequence that is computed by itself, without a scheduler; it is closed when
        it is garbage-collected.
        """
        return Session(self)

    def _set_default_adapter(self, adapter: PackedAdapter | None) -> None:
        """Gives an adapter, for which there is room, to all sequences that name none; None: they have none."""
        if adapter is not None:
            assert self.adapters is not None, "the plan has no room for it"
            self.pools.adapter = self.adapters.attach(adapter)

    @abstractmethod
    def run(self, batch: Batch) -> list[Logits]:
        """Computes one step for a batch of runs, which `Sequence.extend` made; returns the logits of each row that
        gives some, in the order of the rows, as views that are valid until the next step.

        Raises:
            KtError: the step failed; nothing of it may be used.
        """

    @abstractmethod
    def depth_at(self, position: int) -> int:
        """Returns the number of routed experts that the answer's token at `position` may defer: their results are added
        one MoE layer later.
        """

    def how_at(self, position: int) -> int:
        """Returns the byte that encodes how the answer's token at `position` is computed: the number of experts that it
        may defer, plus 0x80, for the absorbed form of attention, in models with latent attention.
        """
        return self.pools.how(self.depth_at(position))

    @property
    @abstractmethod
    def batch_invariant(self) -> bool:
        """Whether the logits of a run have the same bits whichever other runs share its step."""

    @property
    @abstractmethod
    def step_times(self) -> StepTimes | None:
        """The expected seconds of decode steps by their number of rows; None: a row's logits depend on the rows beside
        it, so that drafts could change an answer.
        """

    @property
    @abstractmethod
    def piece_times(self) -> PieceTimes:
        """The modelled seconds of steps that read pieces of a prompt, by their tokens and position; only the ratios
        count.
        """

    @abstractmethod
    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk, 1..left, when `left` tokens are still to be computed;
        one step computes a chunk.
        """

    @abstractmethod
    def chosen(self) -> NDArray[np.int64]:
        """Returns the number of times that the routers chose each expert since the engine was made, [MoE layers,
        E]."""

    @abstractmethod
    def operations(self) -> list[tuple[str, int]]:
        """Returns (operation, nanoseconds) pairs: the time that each operation of the CPU has taken in all steps so
        far, in the order in which they run.
        """
