"""Divides weights between teams by the one rule that the loader, the plan and the tests share.

A team owns consecutive columns of every expert and consecutive rows of every dense matrix, in proportion
to its threads, so that all teams finish at the same time. Cuts lie on whole units, because a packed
weight can only be cut there; a narrow matrix over many teams leaves some of them nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from ktcli.native import PANEL_ROWS, Format, cut_columns, packed_bytes
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe, TensorKind, format_of, format_of_kind

ROW_UNIT = PANEL_ROWS  # rows of a dense matrix

# The teams that share the experts of a layer, by its number; layers that are not named are shared by all teams.
ExpertTeams = Mapping[int, tuple[int, ...]]
ALL_TEAMS: ExpertTeams = {}


def shares_of(
    tensor: Tensor, shares: Sequence[int], teams: ExpertTeams = ALL_TEAMS
) -> Sequence[int]:
    """Returns the share of each team, in proportion to which a tensor is cut: `shares` (threads of each team), with 0
    for teams that do not hold the experts of the tensor's layer.
    """
    if tensor.role is not Role.EXPERTS or tensor.layer is None or tensor.layer not in teams:
        return shares
    own = teams[tensor.layer]
    return [share if team in own else 0 for team, share in enumerate(shares)]


def cut(width: int, unit: int, shares: Sequence[int]) -> tuple[range, ...]:
    """Returns 0..width cut into consecutive ranges, one per share and as near to its proportion as whole units
    allow.

    Every range but the last ends on a multiple of `unit`, and none is more than one unit from its
    proportion of the units (the last of which may be a part of one): cutting where the running sum of the
    shares rounds to keeps both errors below one. Halves round down, so that of two equal teams the one
    with the partial unit has the odd one.

    Args:
        shares: the threads of each team, >= 0 and at least one of them above 0.
    Raises:
        ValueError: `width` or a share is negative, `unit` is less than 1, or no share is above 0.
    """
    total = sum(shares)
    if width < 0 or unit < 1 or total < 1 or min(shares) < 0:
        raise ValueError(f"cannot cut {width} in units of {unit} between {list(shares)}")
    units = -(-width // unit)
    ends = [(2 * units * run + total - 1) // (2 * total) for run in accumulate(shares)]
    edges = [0, *(min(end * unit, width) for end in ends)]
    return tuple(range(first, last) for first, last in pairwise(edges))


@dataclass(frozen=True, slots=True)
class Slice:
    """A team's share of a tensor: some rows or columns of every matrix, or nothing.

    Attributes:
        of: the rows or columns; empty: nothing.
        n, k: the rows and columns of the slice as a matrix; one of them is 0 if there is nothing.
        size_bytes: the bytes of all its matrices, packed.
    """

    of: range
    n: int
    k: int
    size_bytes: int


def slices_of(tensor: Tensor, recipe: Recipe, shares: Sequence[int]) -> tuple[Slice, ...]:
    """Returns each team's slice of a packed tensor (rows or columns, shape and bytes), in the order of `shares`; empty
    if the tensor is not cut.

    The experts of a layer are cut by width: columns of down, and the rows of gate and up that give them.
    """
    fmt = format_of(tensor, recipe)
    if fmt is None or tensor.cut is Cut.NONE or len(shares) == 1:
        return ()
    by_rows = tensor.cut is Cut.ROWS
    if tensor.role is Role.EXPERTS and by_rows:
        # Gate and up alternate: two rows per column of down. Without a gate there is one.
        each = 2 if tensor.alternate else 1
        width = tensor.n // each
        down = format_of_kind(TensorKind.DOWN, recipe).of_columns(width)
        columns = cut(width, cut_columns(down), shares)
        ranges = tuple(range(each * of.start, each * of.stop) for of in columns)
    elif by_rows:
        ranges = cut(tensor.n, ROW_UNIT, shares)
    else:
        ranges = cut(tensor.k, cut_columns(fmt), shares)
    return tuple(_slice(tensor, fmt, each, by_rows) for each in ranges)


def _slice(tensor: Tensor, fmt: Format, of: range, by_rows: bool) -> Slice:
    n, k = (len(of), tensor.k) if by_rows else (tensor.n, len(of))
    size = packed_bytes(fmt, n, k) * tensor.count if n and k else 0
    return Slice(of, n, k, size)
