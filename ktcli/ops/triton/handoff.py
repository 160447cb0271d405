"""Sends the input and the routing of a layer to main memory in one kernel, instead of three copies. Not yet run on a
GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from ktcli.ops.torch.merged import Sent

_BLOCK = 1024  # columns of one program


@triton.jit
def _send_kernel(
    x, ids, gates, to_x, to_ids, to_gates, x_row, to_row, hidden, top_k,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes a row of x, and by the first program its routing, to their twins in main memory. Grid (blocks of columns,
    rows)."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    tl.store(
        to_x + row * to_row + column, tl.load(x + row * x_row + column, mask=inside), mask=inside
    )
    slot = tl.arange(0, SLOTS)
    at, there = row * top_k + slot, slot < tl.where(block == 0, top_k, 0)
    tl.store(to_ids + at, tl.load(ids + at, mask=there), mask=there)
    tl.store(to_gates + at, tl.load(gates + at, mask=there), mask=there)


def send(given: Sent, to: Sent) -> None:
    """Writes x [T, hidden] f32, ids and gates [T, top_k] to pinned memory; only the rows of x may have gaps."""
    x, ids, gates = given
    rows, hidden = x.shape
    top_k = ids.shape[1]
    _send_kernel[(triton.cdiv(hidden, _BLOCK), rows)](
        x, ids, gates, *to, x.stride(0), to[0].stride(0), hidden, top_k,
        BLOCK=_BLOCK, SLOTS=max(2, triton.next_power_of_2(top_k)),
    )  # fmt: skip
