"""Attention over chosen positions in plain torch: the indexer's choice, and latent attention over it.

Rows and rounding are as in `functions`. With one row per sequence no shape depends on a length and nothing waits
for the device: scores of the whole page table, of which the unseen ones lose; the chosen latents are gathered.
Longer runs mask what was not chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ktcli.layers.backend import ChooseShape, MlaShape
from ktcli.layers.gpu.attention import absorb, append, expand, held_by, seen_by
from ktcli.layers.gpu.functions import Rows, rounded
from ktcli.layers.gpu.packed import Packed
from ktcli.native import PAGE_TOKENS

# Queries of a long run that are scored at once: bounds the scores, [heads, queries, positions].
_BLOCK_QUERIES = 64

# int64 [T, K] positions of each row; places behind the row's own are no choice. None: a row attends to all.
Chosen = Tensor | None


def choose(
    q: Tensor,
    key: Tensor,
    weight: Tensor,
    cache: Tensor,
    rows: Rows,
    shape: ChooseShape,
    *,
    exact: bool = False,
) -> Chosen:
    """Append the index keys to the cache, then choose by the rule of kt_program_choose.

    Args:
        q: [T, heads * dim], rotated; key: [T, dim], normed and rotated; weight: [T, heads].
        cache: [pages, 64, dim].
    """
    append(cache, key, rows)
    if rows.pages.shape[1] * PAGE_TOKENS <= shape.top_k:
        return None
    query = rounded(torch.unflatten(q, -1, (shape.heads, shape.dim)), exact)
    if rows.run == 1:
        keys = cache[rows.pages.long()].flatten(1, 2).float()  # [S, L, dim]
        scores = _scores(query[:, None], weight[:, None], keys, shape)[:, 0]
        return _best(scores, seen_by(rows), shape.top_k)
    out = []
    for i, table in enumerate(rows.pages):
        of = slice(i * rows.run, (i + 1) * rows.run)
        keys = held_by(cache, table, rows.positions[of])[None].float()
        places = torch.arange(keys.shape[1], device=q.device)
        for first in range(of.start, of.stop, _BLOCK_QUERIES):
            some = slice(first, min(first + _BLOCK_QUERIES, of.stop))
            scores = _scores(query[None, some], weight[None, some], keys, shape)[0]
            out.append(_best(scores, places <= rows.positions[some, None], shape.top_k))
    return torch.cat(out)


def _scores(query: Tensor, weight: Tensor, keys: Tensor, shape: ChooseShape) -> Tensor:
    """query [S, T, heads, dim], weight [S, T, heads], keys [S, L, dim] -> [S, T, L]."""
    scores = torch.einsum("sthd,sld->sthl", query, keys).relu()
    return torch.einsum("sthl,sth->stl", scores, weight * shape.scale)


def _best(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """int64 [T, K], of equals the lower place first; unseen ones last."""
    order = scores.masked_fill(~seen, float("-inf")).sort(dim=-1, descending=True, stable=True)
    return order.indices[:, :top_k]


def mla(
    q: Tensor,
    latent: Tensor,
    cache: Tensor,
    weights: tuple[Packed, Packed, Packed],
    chosen: Tensor,
    rows: Rows,
    shape: MlaShape,
    *,
    exact: bool = False,
) -> Tensor:
    """Append the latent to the cache, then attend to the chosen positions; see `attention.mla`."""
    append(cache, latent, rows)
    query = torch.unflatten(q, -1, (shape.heads, shape.nope + shape.rope))
    if rows.run == 1:
        page = rows.pages.gather(1, chosen // PAGE_TOKENS).long()
        held = cache[page, chosen % PAGE_TOKENS].float()  # [S, K, lora + rope]
        seen = chosen <= rows.positions[:, None]
        return absorb(query, held, seen, weights, shape, exact)
    out = torch.empty(q.shape[0], shape.heads, shape.v, dtype=torch.float32, device=q.device)
    for i, table in enumerate(rows.pages):
        of = slice(i * rows.run, (i + 1) * rows.run)
        held = held_by(cache, table, rows.positions[of])  # [L, lora + rope]
        mask = torch.zeros(rows.run, held.shape[0], dtype=torch.bool, device=q.device)
        mask.scatter_(1, chosen[of], True)
        mask &= torch.arange(held.shape[0], device=q.device) <= rows.positions[of, None]
        for heads, keys, values in expand(held, weights, shape, exact):
            asked = query[of, heads].transpose(0, 1).to(keys.dtype)  # [heads, run, nope + rope]
            mixed = scaled_dot_product_attention(
                asked[None], keys[None], values[None], attn_mask=mask, scale=shape.scale
            )
            out[of, heads] = mixed[0].transpose(0, 1).float()
    return out.flatten(1)
