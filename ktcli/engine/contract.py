"""The interface of every engine, for chats, servers, evaluation and benchmarks.

An engine is a loaded model, on any device; a `Sequence` is one timeline on it, and a step runs a batch of runs of
several sequences. There are two: `CpuEngine`, and `DeviceEngine` (engine/device) with a GPU. Both follow a plan, and
decide nothing themselves.
"""

from __future__ import annotations

from typing import Protocol

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


class Engine(Protocol):
    """A loaded model: ids in, logits out."""

    @property
    def model(self) -> Model:
        """The model that is loaded: the family's layers and tensors."""

    @property
    def recipe(self) -> Recipe:
        """The number formats of its weights."""

    @property
    def spec(self) -> Spec:
        """The sizes of the model."""

    @property
    def pool(self) -> Pool:
        """The pool whose teams run the CPU's part."""

    @property
    def context(self) -> int:
        """The number of positions that a sequence can have."""

    @property
    def max_tokens(self) -> int:
        """The greatest number of tokens of a prompt's chunk."""

    @property
    def max_rows(self) -> int:
        """The greatest number of rows of a step: a prompt's chunk and, where there is room, answers beside it."""

    @property
    def max_outputs(self) -> int:
        """The greatest number of rows of a step that give logits."""

    @property
    def pools(self) -> Pools:
        """The pools of the pages and states of its sequences."""

    @property
    def memory(self) -> PageMemory:
        """The memory of the pages and states, which stores read and write."""

    @property
    def cache_format(self) -> CacheFormat:
        """The number format of its KV cache."""

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights, on all devices."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the user about requests that the system refused, and their cost."""

    @property
    def adapters(self) -> Adapters | None:
        """The engine's adapters; None: it was loaded without room for any."""

    def sequence(self) -> Sequence:
        """Returns a new sequence, which allocates pages as it grows; the caller closes it."""

    def session(self) -> Session:
        """Returns a new session, whose sequence is computed by itself; it is closed when it is garbage-collected."""

    def run(self, batch: Batch) -> list[Logits]:
        """Computes a batch of runs, which `Sequence.extend` made; returns the logits of each output row, as views:
        valid until the next step. Returns the logits of each row that gives some, in the order of the rows, in place:
        valid until the next step.

        Raises:
            KtError: nothing counts.
        """

    def depth_at(self, position: int) -> int:
        """Returns the number of experts that the token of an answer at `position` may defer."""

    def how_at(self, position: int) -> int:
        """Returns the byte that encodes how the token of an answer at `position` is computed, see `forms`."""

    @property
    def batch_invariant(self) -> bool:
        """Whether the logits of a run have the same bits whatever other runs and outputs its step has."""

    @property
    def step_times(self) -> StepTimes | None:
        """The times of its decode steps by their rows; None: a row's logits depend on the rows beside it, so that
        drafts could change an answer."""

    @property
    def piece_times(self) -> PieceTimes:
        """The modelled times of steps that read pieces of a prompt, of which only the ratios count."""

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk when `left` are left, 1..left."""

    def chosen(self) -> NDArray[np.int64]:
        """Returns the number of times that the routers chose each expert since the engine was made, [MoE layers,
        E]."""

    def operations(self) -> list[tuple[str, int]]:
        """Returns the (operation of the CPU, nanoseconds so far) pairs, in the order in which they run."""
