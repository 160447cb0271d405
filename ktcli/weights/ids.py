"""Finds numbers that name no expert; whoever loads a conversion looks for them as whoever makes one, see `check`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def first_outside(values: NDArray[np.float32], below: int) -> int | None:
    """Returns the index, in the flattened array, of the first value that is not one of the integers 0..below - 1; None:
    all are."""
    flat = values.reshape(-1)
    good = (flat >= 0) & (flat < below) & (flat == np.floor(flat))
    return None if good.all() else int(good.argmin())
