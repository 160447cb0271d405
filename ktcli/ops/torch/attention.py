"""Grouped-query and latent attention over the paged cache in plain torch: the reference, correct on any device.

Rows and rounding are as in `functions`. One row per sequence attends over its whole page table, masked by
position, so that shapes never depend on a length; longer runs gather the pages they reach.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import GqaShape, MlaShape
from ktcli.ops.torch.functions import Rows, product, read_type, rounded
from ktcli.ops.torch.packed import Packed, unpack_whole
from ktcli.ops.torch.pages import KvPages, Pages, append, append_heads, held_at, held_by, of_columns

# Queries of a long run that attend at once: bounds the mask, [queries, cached positions].
_BLOCK_QUERIES = 1024
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Keys and values that latent attention expands at once, in elements.
_EXPANDED_ELEMENTS = 1 << 26


def gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: GqaShape,
    sinks: Tensor | None = None,
    *,
    rows: Rows,
    cache: KvPages,
    exact: bool = False,
) -> Tensor:
    """Appends k and v to the KV cache, then returns the result of causal grouped-query attention.

    Args:
        q: [T, heads * D], rotated; k: [T, kv * D]; v: [T, kv * V].
        sinks: [heads], or None.
        cache: [pages, 64, kv * D] and [pages, 64, kv * V].
    Returns:
        [T, heads * V] f32.
    """
    s = shape
    append_heads(cache, k, v, rows)
    query = torch.unflatten(q, -1, (s.kv_heads, s.heads // s.kv_heads, s.head_dim))
    if rows.single:
        return _gqa_one(rounded(query, exact), cache, rows, s, sinks)
    out = torch.empty(len(q), s.heads * s.value_dim, dtype=torch.float32, device=q.device)
    for of, table in rows.sequences:
        lowest = s.first_seen(rows.positions[of]) if s.window else None
        table, before = _reached(table, lowest, s, rows.start)
        positions = rows.positions[of] - before
        lowest = None if lowest is None else lowest - before
        keys, values = (
            torch.unflatten(held_by(pages, table, positions), -1, (s.kv_heads, -1))
            for pages in cache
        )  # [L, kv, D]
        heads = query[of].permute(1, 2, 0, 3)  # [kv, group, run, D]
        if sinks is not None:
            heads, keys, values = _sunk(heads, keys, values, sinks / s.scale)
        spread = (*heads.shape[:2], -1, -1)
        keys, values = (each.transpose(0, 1)[:, None].expand(spread) for each in (keys, values))
        end = None if s.window or sinks is not None else _end(rows)
        mixed = _attend(heads, keys, values, positions, s.scale, lowest, end)
        out[of] = mixed.permute(2, 0, 1, 3).flatten(1)
    return out


def _gqa_one(
    query: Tensor, cache: KvPages, rows: Rows, s: GqaShape, sinks: Tensor | None
) -> Tensor:
    """Attends with one query per sequence, [S, kv, group, D], over its whole page table."""
    keys, values = (
        torch.unflatten(held_at(pages, rows.pages), -1, (s.kv_heads, -1)) for pages in cache
    )  # [S, L, kv, D]
    seen = seen_by(rows, s)  # [S, L]
    scores = torch.einsum("skgd,slkd->skgl", query, keys) * s.scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    weights = with_sinks(scores, None if sinks is None else sinks.view(1, *scores.shape[1:3], 1))
    # What was not written yet may hold anything, and 0 times NaN is NaN.
    values = values.masked_fill(~seen[:, :, None, None], 0.0)
    return torch.einsum("skgl,slkd->skgd", weights, values).flatten(1)


def mla(
    q: Tensor,
    latent: Tensor,
    uk_in: Packed,
    uk_out: Packed,
    uv: Packed,
    shape: MlaShape,
    *,
    rows: Rows,
    cache: tuple[Pages],
    exact: bool = False,
) -> Tensor:
    """Appends the latent to the KV cache, then returns the result of causal multi-head latent attention (MLA).

    Args:
        q: [T, heads * (nope + rope)], rotated; latent: [T, lora + rope], normed and rotated.
        uk_in, uk_out, uv: [lora, nope], [nope, lora] and [v, lora], one matrix per head.
        cache: [pages, 64, lora + rope].
    Returns:
        [T, heads * v] f32. A single row per sequence, and the rows in `rows.absorbed`, take the absorbed form; for
        others keys and values are expanded from the cache.
    """
    pages, weights = of_columns(cache[0], shape.lora, shape.rope), (uk_in, uk_out, uv)
    append(pages, latent, rows)
    query = torch.unflatten(q, -1, (shape.heads, shape.nope + shape.rope))
    if rows.single:
        held = held_at(pages, rows.pages)  # [S, L, lora + rope]
        return absorb(query, held, seen_by(rows), weights, shape, exact)
    out = torch.empty(q.shape[0], shape.heads, shape.v, dtype=torch.float32, device=q.device)
    for of, table in rows.sequences:
        held = held_by(pages, table, rows.positions[of])  # [L, lora + rope]
        for first, last, absorbed in rows.forms:
            some = slice(of.start + first, of.start + last)
            positions = rows.positions[some]
            if absorbed:
                out[some] = _absorb_run(query[some], held, positions, weights, shape, exact)
                continue
            end = None if rows.start is None else rows.start + last
            for heads, keys, values in expand(held, weights, shape, exact):
                asked = query[some, heads].transpose(0, 1)[None]  # [1, heads, run, nope + rope]
                mixed = _attend(asked, keys[None], values[None], positions, shape.scale, end=end)
                out[some, heads] = mixed[0].transpose(0, 1)
    return out.flatten(1)


def _absorb_run(
    query: Tensor,
    held: Tensor,
    positions: Tensor,
    weights: tuple[Packed, Packed, Packed],
    s: MlaShape,
    exact: bool,
) -> Tensor:
    """Computes `absorb` of rows [T, heads, nope + rope] of one sequence, which holds [L, lora + rope], some rows at a
    time -> [T, heads, v]."""
    places, each = torch.arange(held.shape[0], device=held.device), s.heads * held.shape[0]
    step, wide, out = max(1, _EXPANDED_ELEMENTS // each), held.float(), []
    for first in range(0, len(query), step):
        some = slice(first, first + step)
        seen = places <= positions[some, None]
        latents = wide.expand(len(seen), -1, -1)
        out.append(absorb(query[some], latents, seen, weights, s, exact, written=True))
    return torch.unflatten(torch.cat(out), -1, (s.heads, s.v))


def expand(
    held: Tensor, weights: tuple[Packed, Packed, Packed], s: MlaShape, exact: bool
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields keys and values, expanded from cached latent rows [L, lora + rope], for a few heads at a time.

    Yields:
        The slice of heads, their keys [heads, L, nope + rope] and values [heads, L, v], in the cache's dtype.
    """
    step = max(1, _EXPANDED_ELEMENTS // (held.shape[0] * (s.nope + s.rope + s.v)))
    for first in range(0, s.heads, step):
        heads = slice(first, min(first + step, s.heads))
        yield heads, *_expand(held, weights, heads, s, exact)


def _expand(
    held: Tensor, weights: tuple[Packed, Packed, Packed], heads: slice, s: MlaShape, exact: bool
) -> tuple[Tensor, Tensor]:
    """Returns keys [heads, L, nope + rope] and values [heads, L, v] of cached rows, in the cache's dtype."""
    latent, n = held[:, : s.lora].float(), heads.stop - heads.start

    def through(w: Packed) -> Tensor:
        of_heads = unpack_whole(Packed(w.format, w.n, w.k, w.data[heads]), read_type(exact))
        wide = product(latent, of_heads.flatten(0, 1), exact=exact)
        if w.update is not None:
            wide += w.update.heads(heads).of_heads(latent).flatten(1)
        return torch.unflatten(wide.to(held.dtype), -1, (n, w.n)).transpose(0, 1)

    _, uk_out, uv = weights
    rotated = held[:, s.lora :].expand(n, -1, -1)
    return torch.cat((through(uk_out), rotated), -1), through(uv)


def absorb(
    query: Tensor,
    held: Tensor,
    seen: Tensor,
    weights: tuple[Packed, Packed, Packed],
    s: MlaShape,
    exact: bool,
    *,
    written: bool = False,
) -> Tensor:
    """Returns the output of latent attention in its absorbed form: one query per sequence, [S, heads, nope + rope],
    attends to the cached latents `held` directly.

    Args:
        held: [S, L, lora + rope] f32.
        seen: bool [S, L], the latents that a query may attend to.
        weights: uk_in, uk_out, uv, one matrix per head.
        written: whether all of `held` has been written; if not, the unseen latents may hold NaN.
    Returns:
        [S, heads * v] f32.
    """
    uk_in, _, uv = weights
    absorbed = _of_heads(query[..., : s.nope], uk_in, exact)
    asked = rounded(torch.cat((absorbed, query[..., s.nope :]), -1), exact)
    scores = torch.einsum("shc,slc->shl", asked, held) * s.scale
    chance = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    values = held[..., : s.lora]
    if not written:  # it may hold anything, and 0 times NaN is NaN
        values = values.masked_fill(~seen[:, :, None], 0.0)
    return _of_heads(torch.einsum("shl,slc->shc", chance, values), uv, exact).flatten(1)


def _of_heads(x: Tensor, w: Packed, exact: bool) -> Tensor:
    """The product of each head's rows, x [S, heads, K], with its own matrix -> [S, heads, N]."""
    matrices = unpack_whole(w, read_type(exact)).float()
    made = torch.einsum("shk,hnk->shn", rounded(x, exact), matrices)
    return made if w.update is None else made + w.update.of_heads(x)


def seen_by(rows: Rows, shape: GqaShape | None = None) -> Tensor:
    """Returns the mask bool [S, L] of the cached positions that each sequence's single row may attend to: all up to its
    own, or those in the window if `shape` has one.
    """
    length = rows.pages.shape[1] * PAGE_TOKENS
    lowest = shape.first_seen(rows.positions) if shape and shape.window else None
    return _visible(torch.arange(length, device=rows.pages.device), rows.positions, lowest)


def _visible(places: Tensor, positions: Tensor, lowest: Tensor | None) -> Tensor:
    """Returns bool [T, L]: which of the places [L] a token at each position [T] may attend to: those up to its own,
    from `lowest` [T] on where that is given."""
    seen = places <= positions[:, None]
    return seen if lowest is None else seen & (places >= lowest[:, None])


def _reached(
    table: Tensor, lowest: Tensor | None, shape: GqaShape, start: int | None
) -> tuple[Tensor, int]:
    """Returns a sequence's pages that a run can see, and the number of positions before the first of them. With a
    window it waits for the device, to learn where the run begins, unless `start` says so."""
    if lowest is None:
        return table, 0
    seen = int(lowest[0]) if start is None else shape.first_seen(start)
    first = max(0, seen) // PAGE_TOKENS
    return table[first:], first * PAGE_TOKENS


# Columns that a sink adds to queries and keys: two, padded to vectors of 8.
_SINK_COLUMNS = 8


def _sunk(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [kv, group, run, D], keys and values [L, kv, D] with one more key at the front, whose score
    with each head's queries is `sinks` [heads], as two numbers of the cache's dtype, and whose value is 0."""
    score = torch.unflatten(sinks, -1, q.shape[:2])[..., None, None]
    high = score.to(keys.dtype).float()
    columns = pad(torch.cat((high, score - high), -1), (0, _SINK_COLUMNS - 2))
    key = keys.new_zeros(1, keys.shape[1], keys.shape[2] + _SINK_COLUMNS)
    key[..., keys.shape[2] : keys.shape[2] + 2] = 1.0
    return (
        torch.cat((q, columns.expand(*q.shape[:3], _SINK_COLUMNS)), -1),
        torch.cat((key, pad(keys, (0, _SINK_COLUMNS)))),
        pad(values, (0, 0, 0, 0, 1, 0)),
    )


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax of scores [..., L] over the last dimension, with `sinks` [..., 1] as one more score in the
    denominator; sinks None: the plain softmax.
    """
    if sinks is None:
        return scores.softmax(-1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - peak).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - peak).exp())


def _end(rows: Rows) -> int | None:
    """Returns the number of positions that the last row of a run sees, if the host knows it."""
    return None if rows.start is None else rows.start + rows.run


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    lowest: Tensor | None = None,
    end: int | None = None,
) -> Tensor:
    """Computes causal attention of a run of one sequence, a block of queries at a time.

    Args:
        q: [a, b, run, D] f32; k, v: [a, b, L, …] of the cache's dtype, by position. One more key at the front
            (L = 1 + a multiple of 64) is a sink, which all tokens see.
        positions: int64 [run], consecutive.
        lowest: int64 [run], the first position that each token sees; None: all before it.
        end: the number of positions that the last token sees, where there are neither a window nor sinks: then all
            queries attend at once, without a mask in memory. None: it is not known.
    Returns:
        [a, b, run, width of v] f32.
    """
    if end is not None:
        return attend_causally(q.to(k.dtype), k[:, :, :end], v[:, :, :end], scale).float()
    run, length = q.shape[2], k.shape[2]
    sinks = length % PAGE_TOKENS
    places = torch.arange(-sinks, length - sinks, device=q.device)
    out = []
    for first in range(0, run, _BLOCK_QUERIES):
        last = min(first + _BLOCK_QUERIES, run)
        reach = length - run + last  # no query of the block stands behind this
        low = None if lowest is None else lowest[first:last]
        seen = _visible(places[:reach], positions[first:last], low) | (places[:reach] < 0)
        block = q[:, :, first:last].to(k.dtype)
        keys, values = k[:, :, :reach], v[:, :, :reach]
        out.append(attend(block, keys, values, seen, scale).float())
    return torch.cat(out, 2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns softmax(q k^T scale) v, [B, heads, T, V], of q [B, heads, T, D], k [B, heads, L, D] and v [B, heads, L,
    V], where the queries are the last T of the L positions and each attends to the positions up to its own.
    """
    seen = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(_BACKENDS):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def attend_from_start(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns softmax(q k^T scale) v, [..., T, V], where query i of q [..., T, D] attends to keys 0 to i of k [..., L,
    D] and v [..., L, V]. The kernel has a gradient on the CPU, too.
    """
    with sdpa_kernel(_BACKENDS):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Returns softmax(q k^T scale) v, [..., T, V], of q [..., T, D], k [..., L, D] and v [..., L, V] of one dtype;
    `seen`, bool [..., T, L], says which keys each query attends to.

    cuDNN is not used: it would compile a plan for every new length.
    """
    with sdpa_kernel(_BACKENDS):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
