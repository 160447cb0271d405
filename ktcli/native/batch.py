"""A batch: the work of one step. Its C twins are kt_run and kt_step (native/include/kt_program.h)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.records import dataclass


class Run(NamedTuple):
    """Consecutive tokens of one sequence in a step.

    Attributes:
        ids: [n] int32 token ids, n >= 1.
        start: the position of the first token.
        pages: the cache page of each 64 positions of the sequence, int32.
        first_output: the first token that gives outputs, as all after it do; n: none.
        temperature: the temperature of the sums of a summary; 0: no sums are wanted.
        defer: the most experts per token that a split defers; 0: none.
        state: the slot of the state before `start`; -1: there is none yet, at start 0 only.
        next_state: the slot that gets the state after the run; -1: no operation keeps a state.
        chunk: the (start, tokens) of the prompt's chunk that the run is a piece of: it decides whatever depends on how
            many tokens go together; None: the run itself. (start, 1): each token gives what it gives alone, as drafted
            ones must.
        window_pages: the page of each 64 positions for the layers with a window, int32, read from the first on that the
            run's first token sees; None: they have no pages of their own.
        adapter: the number of the adapter whose updates its rows get; 0: none.
        expanded: the first position that takes the expanded form of latent attention, and the one behind the last; all
            others take the absorbed form.
    """

    ids: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    state: int = -1
    next_state: int = -1
    chunk: tuple[int, int] | None = None
    window_pages: NDArray[np.int32] | None = None
    expanded: tuple[int, int] = (0, 0)
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The runs of a step. Its rows are their tokens, run after run; its outputs lie in the order of rows.

    Attributes:
        runs: decoding runs first, then pieces of prompts: neighbours of a kind share the most work.
    """

    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """The number of tokens of all runs."""
        return sum(run.ids.size for run in self.runs)
