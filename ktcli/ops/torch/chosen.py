"""Attention over chosen positions in plain torch: the indexer's choice, and grouped-query and latent attention over it.

Rows and rounding are as in `functions`. With one row per sequence no shape depends on a length and nothing waits
for the device: the whole page table is scored, positions that a row may not see lose, and what was chosen is gathered.
Longer runs mask what was not chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import ChooseShape, GqaShape, MlaShape
from ktcli.ops.torch import attention
from ktcli.ops.torch.attention import absorb, attend, expand
from ktcli.ops.torch.functions import Rows, in_blocks, rounded
from ktcli.ops.torch.packed import Packed
from ktcli.ops.torch.pages import (
    KvPages,
    Pages,
    append,
    append_heads,
    append_windows,
    held_by,
    plain,
    window_rows,
)
from ktcli.records import dataclass

# Queries of a long run that are scored at once: bounds the scores, [heads, queries, positions].
_BLOCK_QUERIES = 64


@dataclass(frozen=True, slots=True)
class Chosen:
    """The places, positions or windows of them, that rows attend to.

    Attributes:
        places: int64 [T, lists, K]; a place behind the row's own position is not attended to.
        block: the number of positions of a place.
        every: the number of positions of a window, where places are windows; one that is not complete with the row's
            position is not attended to.
    """

    places: Tensor
    block: int
    every: int = 1

    def mask(self, rows: slice, length: int) -> Tensor:
        """Returns the mask bool [lists, T, length] of the T rows in the slice `rows`: True for those of the first
        `length` positions (windows, if places are windows) that a row chose in a list.
        """
        places = self.places[rows]
        shape = (*places.shape[:2], length // self.block + 1)  # one may be open from there on
        taken = torch.zeros(shape, dtype=torch.bool, device=places.device).scatter_(2, places, True)
        wide = taken.repeat_interleave(self.block, 2) if self.block > 1 else taken
        return wide[..., :length].transpose(0, 1)

    def with_open_window(self, positions: Tensor) -> Chosen:
        """Returns the choice with each window as a block of positions and, for each row, one more: the window that is
        incomplete at its position (`positions`, [T]). The caller masks the positions that a row may not see.
        """
        own = (positions + 1) // self.every
        places = torch.cat((self.places, own[:, None, None]), 2)
        return Chosen(places, self.every)

    def positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, for rows with one list, the positions that each row chose, int64 [T, K'], and the mask bool [T, K']
        of those that it may attend to, given the rows' own positions (`positions`, [T]).
        """
        places, own = self.places[:, 0], (positions + 1) // self.every
        if self.every == 1:
            return places, places <= positions[:, None]
        each = torch.arange(self.every, device=places.device)
        inside = (places[..., None] * self.every + each).flatten(1)
        behind = own[:, None] * self.every + each[:-1]
        seen = (places < own[:, None]).repeat_interleave(self.every, 1)
        return torch.cat((inside, behind), 1), torch.cat((seen, behind <= positions[:, None]), 1)


def choose(
    q: Tensor,
    key: Tensor,
    weight: Tensor | None,
    shape: ChooseShape,
    *,
    rows: Rows,
    cache: tuple[Tensor],
    exact: bool = False,
) -> Chosen | None:
    """Appends the index keys to the KV cache, then returns the places (positions, or blocks or windows of them) that
    each row attends to, by the rule of kt_program_choose.

    Args:
        q: [T, heads * dim], rotated; key: [T, dim], normed and rotated; weight: [T, heads] or None.
        cache: [pages, 64, elements], of which each page has 64 / every keys.
    Returns:
        The choice; None if the page tables hold at most `shape.positions` positions, so that nothing has to be chosen.
    """
    pages = window_rows(cache[0], shape.dim, shape.every)
    append_windows(pages, key, rows, shape.every)
    if rows.pages.shape[1] * PAGE_TOKENS <= shape.positions:
        return None
    query = rounded(torch.unflatten(q, -1, (shape.heads, shape.dim)), exact)
    if rows.single:
        keys = pages[rows.pages.long()].flatten(1, 2).float()  # [S, L, dim]
        scores = torch.einsum("shd,sld->shl", query, keys)
        places = torch.arange(keys.shape[1], device=q.device)
        seen = places < (rows.positions[:, None] + 1) // shape.every
        return Chosen(_best(scores, weight, seen, rows.positions, shape), shape.block, shape.every)
    out = []
    for of, table in rows.sequences:
        # Indexed by place, up to the last one that is complete with the run's last position.
        keys = held_by(pages, table, (rows.positions[of] + 1) // shape.every - 1).float()
        places = torch.arange(keys.shape[0], device=q.device)
        for some in in_blocks(of, _BLOCK_QUERIES):
            scores = torch.einsum("thd,ld->thl", query[some], keys)
            at, weights = rows.positions[some], None if weight is None else weight[some]
            out.append(_best(scores, weights, places < (at[:, None] + 1) // shape.every, at, shape))
    return Chosen(torch.cat(out), shape.block, shape.every)


def _best(
    scores: Tensor, weight: Tensor | None, seen: Tensor, positions: Tensor, shape: ChooseShape
) -> Tensor:
    """Returns the best places, int64 [T, lists, K], of equals the lower one first; unseen ones last.

    Args:
        scores: [T, heads, L], products of queries and keys; weight: [T, heads] or None; seen: bool [T, L].
    """
    if weight is not None:
        scores = torch.einsum("thl,th->tl", scores.relu(), weight * shape.scale)[:, None]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if shape.block > 1:
        whole = pad(scores, (0, -scores.shape[2] % shape.block), value=float("-inf"))
        scores = torch.unflatten(whole, -1, (-1, shape.block)).amax(-1)
        blocks = torch.arange(scores.shape[2], device=scores.device)
        behind = positions[:, None] // shape.block - blocks
        is_local = (behind >= 0) & (behind < shape.local)
        scores = scores.masked_fill(is_local[:, None], float("inf"))
    return highest(scores, shape.top_k)


def highest(scores: Tensor, k: int) -> Tensor:
    """Returns the indices of the k highest of scores [..., L] f32 in descending order, int64 [..., min(k, L)]; of equal
    scores, that with the lower index comes first.
    """
    length = scores.shape[-1]
    bits = (scores + 0.0).view(torch.int32)  # a zero has one sign
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = torch.arange(length - 1, -1, -1, device=scores.device)
    return ((ordered << 32) + places).topk(min(k, length), dim=-1).indices


def mla(
    q: Tensor,
    latent: Tensor,
    uk_in: Packed,
    uk_out: Packed,
    uv: Packed,
    shape: MlaShape,
    chosen: Chosen | None = None,
    *,
    rows: Rows,
    cache: tuple[Pages],
    exact: bool = False,
) -> Tensor:
    """Appends the latent to the cache, then returns the output of latent attention over the chosen positions, or over
    all if `chosen` is None, [T, heads * v] f32; arguments and result are those of `attention.mla`.
    """
    weights = uk_in, uk_out, uv
    if chosen is None:
        return attention.mla(q, latent, *weights, shape, rows=rows, cache=cache, exact=exact)
    pages = plain(cache[0])
    append(pages, latent, rows)
    query = torch.unflatten(q, -1, (shape.heads, shape.nope + shape.rope))
    if rows.single:
        at, seen = chosen.positions(rows.positions)
        # What is not seen may lie behind.
        within = (at // PAGE_TOKENS).clamp(max=rows.pages.shape[1] - 1)
        page = rows.pages.gather(1, within).long()
        held = pages[page, at % PAGE_TOKENS].float()  # [S, K, lora + rope]
        return absorb(query, held, seen, weights, shape, exact)
    out = torch.empty(q.shape[0], shape.heads, shape.v, dtype=torch.float32, device=q.device)
    if chosen.every > 1:
        chosen = chosen.with_open_window(rows.positions)
    for of, table in rows.sequences:
        held = held_by(pages, table, rows.positions[of])  # [L, lora + rope]
        seen = torch.arange(held.shape[0], device=q.device) <= rows.positions[of, None]
        mask = chosen.mask(of, held.shape[0])[0] & seen
        for heads, keys, values in expand(held, weights, shape, exact):
            asked = query[of, heads].transpose(0, 1).to(keys.dtype)  # [heads, run, nope + rope]
            mixed = attend(asked[None], keys[None], values[None], mask, shape.scale)
            out[of, heads] = mixed[0].transpose(0, 1).float()
    return out.flatten(1)


def gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: GqaShape,
    sinks: Tensor | None = None,
    chosen: Chosen | None = None,
    *,
    rows: Rows,
    cache: KvPages,
    exact: bool = False,
) -> Tensor:
    """Appends k and v to the cache, then returns grouped-query attention over the chosen blocks, or over all positions
    if `chosen` is None, [T, heads * V] f32; arguments and result are those of `attention.gqa`.
    """
    if chosen is None:
        return attention.gqa(q, k, v, shape, sinks, rows=rows, cache=cache, exact=exact)
    assert sinks is None and not shape.window, "no family has both"
    s = shape
    append_heads(cache, k, v, rows)
    by_head = [torch.unflatten(plain(pages), -1, (s.kv_heads, -1)) for pages in cache]
    query = torch.unflatten(q, -1, (s.kv_heads, s.heads // s.kv_heads, s.head_dim))
    if rows.single:
        return _gqa_one(rounded(query, exact), by_head, chosen, rows, s)
    out = torch.empty(len(q), s.heads * s.value_dim, dtype=torch.float32, device=q.device)
    for of, table in rows.sequences:
        # [L, kv, D]
        keys, values = (held_by(pages, table, rows.positions[of]) for pages in by_head)
        spread = (s.kv_heads, s.heads // s.kv_heads, -1, -1)
        keys, values = (each.transpose(0, 1)[:, None].expand(spread) for each in (keys, values))
        places = torch.arange(keys.shape[2], device=q.device)
        for some in in_blocks(of, _BLOCK_QUERIES):
            mask = chosen.mask(some, keys.shape[2]) & (places <= rows.positions[some, None])
            asked = query[some].permute(1, 2, 0, 3).to(keys.dtype)  # [kv, group, T, D]
            mixed = attend(asked, keys, values, mask[:, None], s.scale)
            out[some] = mixed.float().permute(2, 0, 1, 3).flatten(1)
    return out


def _gqa_one(
    query: Tensor, cache: Sequence[Tensor], chosen: Chosen, rows: Rows, s: GqaShape
) -> Tensor:
    """Attends with one query per sequence, [S, kv, group, D], over the pages of its chosen blocks."""
    each = torch.arange(chosen.block // PAGE_TOKENS, device=query.device)
    pages = (chosen.places[..., None] * each.shape[0] + each).flatten(2)  # [S, kv, P]
    within = pages.clamp(max=rows.pages.shape[1] - 1)  # the last block may reach behind the table
    physical = rows.pages[:, None].expand(-1, s.kv_heads, -1).gather(2, within).long()
    heads = torch.arange(s.kv_heads, device=query.device)[:, None]
    keys, values = (part.transpose(1, 2)[physical, heads].flatten(2, 3).float() for part in cache)
    places = pages[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=query.device)
    seen = (places <= rows.positions[:, None, None, None]).flatten(2)  # [S, kv, P * 64]
    scores = torch.einsum("skgd,skld->skgl", query, keys) * s.scale
    weights = scores.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
    # What was not written yet may hold anything, and 0 times NaN is NaN.
    values = values.masked_fill(~seen[..., None], 0.0)
    return torch.einsum("skgl,skld->skgd", weights, values).flatten(1)
