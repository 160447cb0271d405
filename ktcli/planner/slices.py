"""Where a weight is cut between teams: the one rule that the loader, the plan and the tests share.

A team owns consecutive columns of every expert and consecutive rows of every dense matrix, in proportion
to its threads, so that all teams finish at the same time. Cuts lie on whole units, because a packed
weight can only be cut there; a narrow matrix over many teams leaves some of them nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ktcli.native import PANEL_ROWS, Format

ROW_UNIT = PANEL_ROWS  # rows of a dense matrix
ALTERNATE_ROW_UNIT = 2 * PANEL_ROWS  # where gate and up alternate: a panel of each


def cut(width: int, unit: int, shares: Sequence[int]) -> tuple[range, ...]:
    """0..width in consecutive ranges, one per share and as near to its proportion as whole units allow.

    Every range but the last ends on a multiple of `unit`, and none is more than one unit from its
    proportion of the units (the last of which may be a part of one): cutting where the running sum of the
    shares rounds to keeps both errors below one. Halves round down, so that of two equal teams the one
    with the partial unit has the odd one.

    Args:
        shares: threads of each team, >= 0 and at least one of them above it.
    Raises:
        ValueError: there is nothing to cut by.
    """
    total = sum(shares)
    if width < 0 or unit < 1 or total < 1 or min(shares) < 0:
        raise ValueError(f"cannot cut {width} in units of {unit} between {list(shares)}")
    units = -(-width // unit)
    ends = [(2 * units * run + total - 1) // (2 * total) for run in accumulate(shares)]
    edges = [0, *(min(end * unit, width) for end in ends)]
    return tuple(range(first, last) for first, last in pairwise(edges))


def unit_of(fmt: Format) -> int:
    """Columns between two cuts of a packed weight: a step of the kernels, or a group of scales."""
    return max(64 if fmt.bits <= 8 else 32, fmt.group)
