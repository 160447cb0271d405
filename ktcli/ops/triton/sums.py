"""Computes the sums of split products and of a token's experts, in a separate kernel or at the start of the one that
reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.ops.torch.merged import Parts
from ktcli.ops.triton.early import early, enter


class Sum(NamedTuple):
    """The kernel arguments of a `Parts`: pointers, strides, and compile-time constants.

    Attributes:
        n_parts: the number of parts; all_parts is that or more, a power of two.
    """

    data: Tensor
    ids: Tensor | None
    slots: Tensor | None
    gates: Tensor | None
    beside: Tensor | None
    row: int
    part: int
    beside_row: int
    n_parts: int
    all_parts: tl.constexpr
    routed: tl.constexpr
    has_beside: tl.constexpr

    @classmethod
    def of(cls, parts: Parts) -> Sum:
        """Returns the arguments (tensors, strides, constants) with which a kernel reads and adds up the sum `parts`."""
        data, beside = parts.values, parts.beside
        ids, slots, gates = parts.routed or (None, None, None)
        beside_row = beside.stride(0) if beside is not None and beside.dim() == 2 else 0
        n = data.shape[1]
        most = tl.constexpr(triton.next_power_of_2(n))
        routed, has_beside = tl.constexpr(ids is not None), tl.constexpr(beside is not None)
        pointers = data, ids, slots, gates, beside
        return cls(
            *pointers, data.stride(0), data.stride(1), beside_row, n, most, routed, has_beside
        )


@triton.jit
def summed(of, row, columns, inside):
    """Returns the given columns of one row of the `Sum` `of`, added up: part after part, then the part beside. They are
    0 where not `inside`.
    """
    total = tl.zeros(columns.shape, tl.float32)
    for number in tl.static_range(of.all_parts):
        part = tl.full([1], number, tl.int32)
        taken = part < of.n_parts
        weight = 1.0
        if of.routed:
            at = row * of.n_parts + part
            expert = tl.load(of.ids + at, mask=taken, other=-1)
            slot = tl.load(of.slots + tl.maximum(expert, 0), mask=expert >= 0, other=-1)
            taken = slot >= 0
            # Of no expert it may be anything.
            weight = tl.load(of.gates + at, mask=taken, other=0.0)
        values = of.data + row * of.row + part * of.part + columns
        total += tl.load(values, mask=inside & taken, other=0.0) * weight
    if of.has_beside:
        total += tl.load(of.beside + row * of.beside_row + columns, mask=inside, other=0.0)
    return total


@triton.jit
def _sum_kernel(of, out, n_columns, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Computes out [rows][n_columns] of a `Sum`. Grid (blocks of columns, rows)."""
    enter(EARLY)
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n_columns
    tl.store(out + row * n_columns + columns, summed(of, row, columns, inside), mask=inside)


def sum_parts(parts: Parts) -> Tensor:
    """Returns the rows of a sum of parts, added up, [T, N] f32."""
    if (alone := parts.alone) is not None:
        return alone
    rows, width = parts.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=parts.values.device)
    _sum_kernel[(triton.cdiv(width, 128), rows)](Sum.of(parts), out, width, BLOCK=128, **early(out))
    return out
