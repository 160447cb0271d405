"""A batch: what one step computes, runs of several sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence in a step."""

    ids: NDArray[np.int32]
    start: int
    pages: NDArray[np.int32]
    first_output: int
    temperature: float = 0.0
    defer: int = 0
    state: int = -1
    next_state: int = -1
    chunk: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The runs of a step."""

    runs: tuple[Run, ...]
