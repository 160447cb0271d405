"""The rows of the table of operations: those that a forward uses, and those that only passes over a recording make."""

from __future__ import annotations

from ktcli.ops.backend import Backend, Call
from ktcli.ops.operation import Operation
from ktcli.ops.table.experts import Carry, SplitRouting
from ktcli.ops.table.rowwise import Summary

FORWARD: tuple[type[Operation], ...] = tuple(
    each.row
    for each in vars(Backend).values()
    if isinstance(each, Call) and isinstance(each.row, type)
)
MADE_BY_PASSES: tuple[type[Operation], ...] = (SplitRouting, Carry, Summary)
TABLE = FORWARD + MADE_BY_PASSES
