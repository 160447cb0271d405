"""A router's product and the choice of its experts as one kernel, for a few rows.

The programs of a row make its logits, each those of two experts over a split of the columns, and the last one that is
done chooses. Which one is last is told by a ticket: a program writes its sums and adds one to the row's counter, with
release and acquire, in the same thread; who draws the last ticket therefore sees the sums of all. Nobody waits for
anybody. No sum is taken in the order of tickets, and splits depend on the shape alone: same inputs, same bits, in any
company.

The counters belong to one router's weight (`PlainMatrix.tickets`): kernels on two devices share none, and those of one
device are in one stream. The last program sets its row's to 0 again, and the next kernel of that router begins behind
this one, `early` or not. A kernel that has begun runs all of its programs, or the device has failed for good, and a
capture runs nothing: no step that fails leaves a counter in between.

The arithmetic behind the shape, for an H100 (132 SMs, 3.35 TB/s; 18 kB per SM are to be on the way at a time):
  Programs. Weights are f32, 1 MiB of qwen3-30b-a3b and 7 MiB of deepseek-v3. A program is one warp that reads tiles of
  8 kB, 1024 columns of two experts. 512 of deepseek-v3 have 31 kB per SM on the way, 128 of qwen3-30b-a3b all that
  there is, one on each SM. More would draw more tickets, which a counter gives out one after the other.
  Warps. One warp chooses, too: its dozens of reductions are shuffles without a barrier, as in `small`. 512 experts take
  it 2200 instructions instead of the 980 of four warps, which meet at 63 barriers: about the same. For the one or two
  barriers that Triton puts at a ticket, one warp does not wait.
  Registers. 185 to 217 per thread up to 512 experts (sm_80 to sm_120, ptxas of Triton 3.9), nothing is spilled, and the
  24 loads of a tile stand in front of its first sum.
  Gain. A ticket is a round trip to L2, about 1 us. A second kernel is 1 to 2 us, and torch's product, which neither
  starts early nor lets the next one, as much in front and behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktcli.ops.table.experts import Routing
from ktcli.ops.torch.merged import Sent
from ktcli.ops.torch.packed import Matrix, PlainMatrix
from ktcli.ops.triton.early import early, enter
from ktcli.ops.triton.small import choice, choice_arguments, write_choice

_COLUMNS = 1024  # of a tile
# Of a thread, at most: all that there are. Left to itself, ptxas saves registers and loads a part of a tile when
# another has been used, which makes two to five round trips to memory of one.
_REGISTERS = 255
_PROGRAMS = 528  # of a row at most, four for each of 132 SMs; constant, so that bits do not depend on the GPU
# By several rows, each of which reads the weights by itself, all but the first from L2: 3 us at its 5.5 TB/s, about
# what a second kernel costs, whose product reads them once for all rows.
_READ_BYTES = 16 << 20


@triton.jit
def _router_kernel(
    x, weight, logit_bias, bias, factors, live, sums, tickets, ids, gates, sent, to_x, to_ids, to_gates,
    x_row, sent_row, to_row, hidden, sent_width, span, n_experts, blocks, copies, scale, band,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr,
    N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP2: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, MASKED: tl.constexpr, SENT: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes the logits of a row of x in sums [rows][SPLITS][n_experts], and chooses its experts as `_route_kernel`.
    SHIFTED: logit_bias is added to the logits.

    Grid (rows, copies + blocks * SPLITS): blocks of two experts, splits of `span` columns, and first, for they have the
    longest way, `copies` of COLUMNS of a row of `sent` if SENT.
    """
    enter(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SENT:
        if place < copies:
            column = place * COLUMNS + tl.arange(0, COLUMNS)
            value = tl.load(sent + row * sent_row + column, mask=column < sent_width, other=0.0)
            tl.store(to_x + row * to_row + column, value, mask=column < sent_width)
            return
        place -= copies
    split = place // blocks
    one = place % blocks * 2
    two = tl.minimum(one + 1, n_experts - 1)  # of an odd number, the last is read twice
    first = weight + one.to(tl.int64) * hidden
    second = weight + two.to(tl.int64) * hidden
    total_one = tl.zeros([COLUMNS], tl.float32)
    total_two = tl.zeros([COLUMNS], tl.float32)
    last = tl.minimum(split * span + span, hidden)
    for at in range(split * span, last, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = column < last
        value = tl.load(x + row * x_row + column, mask=inside, other=0.0)
        total_one += tl.load(first + column, mask=inside, other=0.0).to(tl.float32) * value
        total_two += tl.load(second + column, mask=inside, other=0.0).to(tl.float32) * value
    sums += row * SPLITS * n_experts
    tl.store(sums + split * n_experts + one, tl.sum(total_one, axis=0))
    tl.store(sums + split * n_experts + two, tl.sum(total_two, axis=0))
    if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") != blocks * SPLITS - 1:
        return
    tl.store(tickets + row, 0)
    expert = tl.arange(0, BLOCK)
    known = expert < n_experts
    logits = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(SPLITS):
        # Volatile: not from L1, for others wrote it while this kernel ran.
        part = sums + number * n_experts + expert
        logits += tl.load(part, mask=known, other=0.0, volatile=True)
    if SHIFTED:
        logits += tl.load(logit_bias + expert, mask=known, other=0.0)
    chosen, gate = choice(
        tl.where(known, logits, float("-inf")), bias, factors, n_experts, scale, band,
        TOP_K, SCORE, BIASED, NORMALIZE, N_GROUP, TOPK_GROUP, TOP2, FACTORED, BLOCK, SLOTS, GROUPS,
    )  # fmt: skip
    write_choice(chosen, gate, row, live, ids, gates, to_ids, to_gates, TOP_K, MASKED, SENT, SLOTS)


def choose(
    x: Tensor,
    weight: Matrix,
    logit_bias: Tensor | None,
    routing: Routing,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    live: Tensor | None = None,
    sent: Tensor | None = None,
    to: Sent | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns the top_k experts of each row, ids int32 [T, K] and gates f32 [T, K], by the logits x [T, hidden] W^T +
    logit_bias, all in f32. `live` and `to` are as in `small.route_all`, and `sent` is what is written to `to`. None:
    one kernel cannot compute it.
    """
    r, rows = routing, x.shape[0]
    if not isinstance(weight, PlainMatrix) or (tickets := weight.tickets) is None:
        return None
    if rows > tickets.shape[0] or (rows > 1 and rows * weight.data.nbytes > _READ_BYTES):
        return None
    to_x, to_ids, to_gates = to or (None, None, None)
    strides, width = (0, 0), 0
    if sent is not None and to_x is not None:
        strides, width = (sent.stride(0), to_x.stride(0)), sent.shape[1]
    blocks, copies = triton.cdiv(r.experts, 2), triton.cdiv(width, _COLUMNS)
    span, splits = _splits(weight.k, blocks)
    ids = torch.empty(rows, r.top_k, dtype=torch.int32, device=x.device)
    gates = torch.empty(rows, r.top_k, dtype=torch.float32, device=x.device)
    sums = torch.empty(rows, splits, r.experts, dtype=torch.float32, device=x.device)
    _router_kernel[(rows, copies + blocks * splits)](
        x, weight.data, logit_bias, bias, factors, None if live is None else live.view(torch.uint8),
        sums, tickets, ids, gates, sent if copies else None, to_x, to_ids, to_gates,
        x.stride(0), *strides, weight.k, width, span, r.experts, blocks, copies,
        float(r.scale), float(r.band),
        **choice_arguments(r, bias, factors, live), SHIFTED=logit_bias is not None, SENT=copies > 0,
        SPLITS=splits, COLUMNS=_COLUMNS,
        num_warps=1, maxnreg=_REGISTERS, **early(x),
    )  # fmt: skip
    return ids, gates


def _splits(hidden: int, blocks: int) -> tuple[int, int]:
    """The columns of one split, a multiple of a tile, and the number of splits: as many as there may be programs."""
    tiles = triton.cdiv(hidden, _COLUMNS)
    each = triton.cdiv(tiles, max(1, min(_PROGRAMS // blocks, tiles)))
    return each * _COLUMNS, triton.cdiv(tiles, each)
