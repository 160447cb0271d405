"""Attention over one key, which is its own value, in plain torch: a window that lies in the sequence's state, and
pooled rows of windows, which lie in pages. The rule is that of kt_program_mqa.

With one row per sequence no shape depends on a length and nothing waits for the device; longer runs wait for where
they begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.layers.gpu.attention import append_windows, windows_at, with_sinks
from ktcli.layers.gpu.chosen import Chosen
from ktcli.layers.gpu.functions import Rows, rounded
from ktcli.layers.gpu.recurrent import States
from ktcli.layers.windows import MqaShape
from ktcli.native import PAGE_TOKENS

# Queries of a long run that attend at once: bounds the scores, [heads, queries, keys].
_BLOCK_QUERIES = 64


def mqa(
    q: Tensor,
    kv: Tensor,
    pooled: Tensor | None,
    cache: Tensor,
    rows: Rows,
    shape: MqaShape,
    kept: tuple[States, int],
    sinks: Tensor | None,
    chosen: Chosen | None,
    *,
    exact: bool = False,
) -> Tensor:
    """Append the pooled rows to the cache and kv to the state, then attend.

    Args:
        q: [T, heads * dim], kv: [T, dim], rotated; pooled: [T, dim], or None.
        cache: [pages, 64 / every, dim] of pooled rows.
        kept: states, and the element with which this one's part begins.
        sinks: [heads], or None.
    Returns:
        [T, heads * dim] f32.
    """
    if pooled is not None:
        append_windows(cache, pooled, rows, shape.every)
    states, first = kept
    ring = states.read(first, (shape.window, shape.dim))
    way = _one if rows.run == 1 else _runs
    query = rounded(torch.unflatten(q, -1, (shape.heads, shape.dim)), exact)
    out, after = way(query, kv, ring, cache, rows, shape, sinks, chosen, exact)
    states.write(first, after)
    return out.flatten(1)


def _attend(
    query: Tensor, keys: Tensor, seen: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """query [T, heads, dim] on keys [T, L, dim], or [L, dim] of all, of which those count that are seen, bool
    [T, L]. Keys hold numbers, seen or not."""
    scores = (query @ keys.mT * scale).masked_fill(~seen[:, None], float("-inf"))
    return with_sinks(scores, None if sinks is None else sinks[:, None]) @ keys


def _one(
    query: Tensor,
    kv: Tensor,
    ring: Tensor,
    cache: Tensor,
    rows: Rows,
    s: MqaShape,
    sinks: Tensor | None,
    chosen: Chosen | None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """One query per sequence, [S, heads, dim]; the result, and the ring [S, window, dim] of the next step."""
    at = rows.positions[:, None]
    place = torch.arange(s.window, device=kv.device)
    ring = torch.where((place == at % s.window)[..., None], kv[:, None], ring)
    keys, seen = [rounded(ring, exact)], [(at - place) % s.window <= at]
    if s.every:
        if chosen is None:
            count = rows.pages.shape[1] * PAGE_TOKENS // s.every
            numbers = torch.arange(count, device=kv.device).expand(kv.shape[0], -1)
        else:
            numbers = chosen.places[:, 0]
        keys.append(windows_at(cache, rows.pages, numbers, s.every))
        seen.append(numbers < (at + 1) // s.every)
    every, counts = torch.cat(keys, 1), torch.cat(seen, 1)
    # What was not written yet may hold anything, and 0 times NaN is NaN.
    return _attend(query, every.masked_fill(~counts[..., None], 0.0), counts, s.scale, sinks), ring


def _runs(
    query: Tensor,
    kv: Tensor,
    rings: Tensor,
    cache: Tensor,
    rows: Rows,
    s: MqaShape,
    sinks: Tensor | None,
    chosen: Chosen | None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Runs of queries, [T, heads, dim], of a sequence after the other."""
    out, after = torch.empty_like(query), []
    for i, (ring, table) in enumerate(zip(rings, rows.pages, strict=True)):
        of = slice(i * rows.run, (i + 1) * rows.run)
        positions = rows.positions[of]
        there = torch.arange(-s.window, rows.run, device=kv.device) + positions[0]
        held = torch.cat((ring[there[: s.window] % s.window], kv[of]))  # [window + run, dim]
        held = held.masked_fill((there < 0)[:, None], 0.0)
        place = torch.arange(s.window, device=kv.device)
        newest = positions[-1] - (positions[-1] - place) % s.window
        after.append(held[newest - there[0]])
        keys, count = (
            rounded(held, exact),
            table.shape[0] * PAGE_TOKENS // s.every if s.every else 0,
        )
        numbers = torch.arange(count, device=kv.device)
        if s.every:
            rest = windows_at(cache, table, numbers, s.every)
            is_there = numbers < (positions[-1] + 1) // s.every
            keys = torch.cat((keys, rest.masked_fill(~is_there[:, None], 0.0)))
        for first in range(of.start, of.stop, _BLOCK_QUERIES):
            some = slice(first, min(first + _BLOCK_QUERIES, of.stop))
            at = rows.positions[some, None]
            seen = [(there <= at) & (there > at - s.window) & (there >= 0)]
            if s.every:
                complete = numbers < (at + 1) // s.every
                seen.append(complete if chosen is None else complete & chosen.mask(some, count)[0])
            out[some] = _attend(query[some], keys, torch.cat(seen, 1), s.scale, sinks)
    return out, torch.stack(after)
