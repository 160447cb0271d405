"""Reads what configs of models with Mamba-2 say alike.

Every reader raises BadCheckpoint where a field is missing, of the wrong type, out of bounds or not supported.
"""

from __future__ import annotations

import math

from ktcli.errors import BadCheckpoint
from ktcli.models.config import INFINITE, Fields


def read_time_limits(f: Fields) -> tuple[float, float]:
    """Returns the bounds of the time step, from `time_step_limit`; (0, infinity) where it is not there."""
    limits = f.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise BadCheckpoint(f"{f.where}: time_step_limit is not a list of two numbers")
    low, high = (
        math.inf if each in (INFINITE, math.inf) else Fields({name: each}, f.where).number(name)
        for name, each in zip(("time_step_limit[0]", "time_step_limit[1]"), limits, strict=True)
    )
    if not low <= high or math.isinf(low):
        raise BadCheckpoint(f"{f.where}: time_step_limit is {low:g}..{high:g}")
    return low, high
