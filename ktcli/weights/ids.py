"""Finds numbers that name no expert; whoever loads a conversion looks for them as whoever makes one, see `check`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def first_outside(values: NDArray[np.float32], below: int) -> int | None:
    """Returns the index of the first number that is not whole or not one of 0..below - 1; None: there is none."""
    flat = values.reshape(-1)
    good = (flat >= 0) & (flat < below) & (flat == np.floor(flat))
    return None if good.all() else int(good.argmin())
