"""Dropout of the rows that factors read, as peft has it: what a dense matrix itself reads stays whole.

Which elements are dropped follows from the seed, the step and the name of the target alone, so that a layer that is
computed again, a run that goes on, and any number of threads drop the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

_DROPPED = 9  # beside the seed: for no other draws
_VALUES = 1 << 16  # of a random number that decides on one element


def random_numbers(name: str, seed: int, use: int, step: int) -> np.random.SFC64:
    """Returns the generator of random numbers that follows from a name, a seed, a kind of use and a step: the same for
    the same four.
    """
    words = np.frombuffer(sha256(name.encode()).digest(), np.uint32).tolist()
    return np.random.SFC64([seed, use, step, *words])


class Dropout:
    """The dropout of a model's factors; it drops nothing outside of a step.

    Args:
        rate: the share of elements that are dropped, 0 to below 1.
    Attributes:
        first: the number in its step of the first row that is computed now.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._below = round(rate * _VALUES)
        self._seed, self.first = seed, 0
        self._step: int | None = None

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Opens a context, without a value, in which elements are dropped as the step number 0, 1, … decides; none are
        if the rate is 0.
        """
        self._step = step if self._below else None
        try:
            yield
        finally:
            self._step = None

    @property
    def active(self) -> bool:
        """Whether elements are dropped now: within `during`, at a rate above 0."""
        return self._step is not None

    @property
    def scale(self) -> float:
        """The factor of the remaining elements, about 1 / (1 - rate), which preserves their mean; 1 outside of a
        step.
        """
        return 1.0 if self._step is None else _VALUES / (_VALUES - self._below)

    def thinned(self, name: str, x: Tensor, first: int = 0) -> Tensor:
        """Returns x [T, k] with the elements that this step drops for the target of this name set to zero, the others
        not multiplied by `scale`; x itself outside of a step. `first` is the number of the first row of x among those
        that are computed now.
        """
        if self._step is None:
            return x
        return torch.where(self._kept(self._step, name, x, self.first + first), x, x.new_zeros(()))

    def _kept(self, step: int, name: str, x: Tensor, first: int) -> Tensor:
        """Which elements of x are kept, bool [T, k]."""
        numbers = random_numbers(name, self._seed, _DROPPED, step)
        count = (first + len(x)) * x.shape[1]
        drawn = numbers.random_raw(-(-count // 4)).view(np.uint16)[first * x.shape[1] : count]
        return torch.from_numpy(drawn >= self._below).view(x.shape).to(x.device)
