"""A router's product and its choice as one kernel, for a few rows. Not yet run on a GPU.

The programs of a row make its logits, a block of experts each, and the last of them that is done chooses. Which one is
last is told by a ticket: a program writes its logits, waits until all of its threads have, and adds one to a counter
with release and acquire; who draws the last ticket therefore sees the logits of all. It sets the counter to 0 again,
after which no program of this kernel touches it; the next kernel on it begins when this one is complete, `early` or
not. No sum is taken in the order of tickets: logits have the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.ops.table.experts import GroupScore, Routing
from ktcli.ops.torch.merged import Sent
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.small import choice

_PROGRAMS = 128  # of a row, about one for each multiprocessor


@triton.jit
def _router_kernel(
    x, weight, bias, live, logits, tickets, ids, gates, to_x, to_ids, to_gates,
    x_row, to_row, hidden, n_experts, n_blocks, scale,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP2: tl.constexpr,
    MASKED: tl.constexpr, SENT: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes the logits of a row and chooses its experts. Grid (rows, n_blocks of EXPERTS, and one more for each
    COLUMNS of x if SENT). ROUNDED: factors are read as bf16."""
    enter(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SENT:
        if block >= n_blocks:
            column = (block - n_blocks) * COLUMNS + tl.arange(0, COLUMNS)
            value = tl.load(x + row * x_row + column, mask=column < hidden, other=0.0)
            tl.store(to_x + row * to_row + column, value, mask=column < hidden)
            return
    mine = block * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS, COLUMNS], tl.float32)
    for start in range(0, hidden, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        a = tl.load(x + row * x_row + column, mask=column < hidden, other=0.0)
        at = mine.to(tl.int64)[:, None] * hidden + column[None, :]
        w = tl.load(
            weight + at, mask=(mine < n_experts)[:, None] & (column < hidden)[None, :], other=0.0
        )
        if ROUNDED:
            a = a.to(tl.bfloat16).to(tl.float32)
            w = w.to(tl.bfloat16)
        total += w.to(tl.float32) * a[None, :]
    tl.store(logits + row * n_experts + mine, tl.sum(total, axis=1), mask=mine < n_experts)
    tl.debug_barrier()
    if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") != n_blocks - 1:
        return
    tl.store(tickets + row, 0)
    expert = tl.arange(0, BLOCK)
    known = expert < n_experts
    # Others wrote these while this kernel ran: not from L1.
    made = tl.load(
        logits + row * n_experts + expert, mask=known, other=float("-inf"), volatile=True
    )
    chosen, gate = choice(
        made, bias, n_experts, scale,
        TOP_K, SCORE, BIASED, NORMALIZE, N_GROUP, TOPK_GROUP, TOP2, BLOCK, SLOTS, GROUPS,
    )  # fmt: skip
    if MASKED:
        chosen = tl.where(tl.load(live + row) != 0, chosen, -1)
    slot = tl.arange(0, SLOTS)
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(gates + row * TOP_K + slot, gate, mask=slot < TOP_K)
    if SENT:
        tl.store(to_ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
        tl.store(to_gates + row * TOP_K + slot, gate, mask=slot < TOP_K)


def choose(
    x: Tensor,
    weight: Tensor,
    r: Routing,
    bias: Tensor | None,
    tickets: Tensor,
    *,
    rounded: bool,
    live: Tensor | None = None,
    to: Sent | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses top_k experts per row of x [T, hidden] by a router's weight [E, hidden]. tickets: int32 [T or more], 0
    before and after."""
    tokens, hidden = x.shape
    ids = torch.empty(tokens, r.top_k, dtype=torch.int32, device=x.device)
    gates = torch.empty(tokens, r.top_k, dtype=torch.float32, device=x.device)
    logits = torch.empty(tokens, r.experts, dtype=torch.float32, device=x.device)
    to_x, to_ids, to_gates = to or (None, None, None)
    each = triton.next_power_of_2(triton.cdiv(r.experts, _PROGRAMS))
    blocks, columns = triton.cdiv(r.experts, each), 1024
    copies = 0 if to is None else triton.cdiv(hidden, columns)
    _router_kernel[(tokens, blocks + copies)](
        x, weight, bias, None if live is None else live.view(torch.uint8), logits, tickets,
        ids, gates, to_x, to_ids, to_gates, x.stride(0), 0 if to is None else to_x.stride(0),
        hidden, r.experts, blocks, float(r.scale),
        TOP_K=r.top_k, SCORE=int(r.score), BIASED=bias is not None, NORMALIZE=r.normalize,
        N_GROUP=r.n_group, TOPK_GROUP=r.topk_group,
        TOP2=r.group_score is GroupScore.TOP2 and r.experts > r.n_group,
        MASKED=live is not None, SENT=to is not None, ROUNDED=rounded,
        BLOCK=max(2, triton.next_power_of_2(r.experts)), SLOTS=max(2, triton.next_power_of_2(r.top_k)),
        GROUPS=max(2, triton.next_power_of_2(r.n_group)), EXPERTS=each, COLUMNS=columns,
        num_warps=4, **early(x),
    )  # fmt: skip
    return ids, gates
