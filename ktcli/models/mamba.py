"""Reads Mamba-2 from configs, with the limits of the fields.

Names are those of Nemotron 3, each with that of Granite 4. Every reader raises BadCheckpoint where a field is missing,
of the wrong type, out of bounds or not supported.
"""

from __future__ import annotations

import math

from ktcli.errors import BadCheckpoint
from ktcli.layers.mamba2 import Mamba2
from ktcli.models.config import INFINITE, MAX_HEADS, Fields, read_eps
from ktcli.ops.table.recurrent import ScanShape


def read_mamba(f: Fields, head_dim: int) -> Mamba2:
    """Returns the Mamba-2 layer that a config describes: its sizes, limits of the time step and biases, with heads of
    `head_dim` columns.
    """
    f.only({"mamba_proj_bias": False})
    heads = f.whole("mamba_num_heads", high=MAX_HEADS)
    groups = f.whole("n_groups", high=heads)
    f.require_multiple("mamba_num_heads", heads, groups, "n_groups")
    state = f.whole("ssm_state_size", high=4096)
    f.require_width("width of Mamba-2", 2 * heads * head_dim + 2 * groups * state)
    return Mamba2(
        f.whole("hidden_size"),
        ScanShape(heads, groups, state, head_dim, *_time_limits(f)),
        f.whole("conv_kernel", low=2, high=16),
        read_eps(f),
        f.flag("use_conv_bias", True),
        norm_runs=groups,
    )


def _time_limits(f: Fields) -> tuple[float, float]:
    """Returns the bounds of the time step; (0, infinity) where the config has none."""
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
