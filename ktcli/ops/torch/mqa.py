"""Multi-query attention whose key is also its value, in plain torch: over a window in the sequence's state, and over
pooled rows in its pages. The rule is that of kt_program_mqa.

With one row per sequence no shape depends on a length and nothing waits for the device; longer runs wait for where
they begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.table.attention import MqaShape
from ktcli.ops.torch.attention import with_sinks
from ktcli.ops.torch.chosen import Chosen
from ktcli.ops.torch.functions import Rows, in_blocks, rounded
from ktcli.ops.torch.pages import append_windows, window_rows, windows_at
from ktcli.ops.torch.recurrent import States
from ktcli.records import dataclass

# Queries of a long run that attend at once: bounds the scores, [heads, queries, keys].
_BLOCK_QUERIES = 64


@dataclass(frozen=True)
class _Attending:
    """The keys of a step, and how queries attend to them.

    Attributes:
        kv: [T, dim], keys of the step; rings: [sequences, window, dim], keys of the positions before it.
        cache: [pages, 64 / every, dim], pooled rows.
    """

    kv: Tensor
    rings: Tensor
    cache: Tensor
    rows: Rows
    shape: MqaShape
    sinks: Tensor | None
    chosen: Chosen | None
    exact: bool

    def attend(self, query: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Attends with query [T, heads, dim] to those of keys [T, L, dim], or [L, dim] for all, that are seen, bool
        [T, L]. Keys must be finite, seen or not."""
        scores = (query @ keys.mT * self.shape.scale).masked_fill(~seen[:, None], float("-inf"))
        return with_sinks(scores, None if self.sinks is None else self.sinks[:, None]) @ keys


def mqa(
    q: Tensor,
    kv: Tensor,
    pooled: Tensor | None,
    shape: MqaShape,
    sinks: Tensor | None = None,
    chosen: Chosen | None = None,
    *,
    rows: Rows,
    cache: tuple[Tensor],
    state: States,
    exact: bool = False,
) -> Tensor:
    """Appends the pooled rows to the cache and kv to the state, then returns multi-query attention over the pooled rows
    (only those in `chosen`, unless it is None) and the last positions.

    Args:
        q: [T, heads * dim], kv: [T, dim], rotated; pooled: [T, dim], or None.
        sinks: [heads], or None.
        cache: [pages, 64, elements], of which each page has 64 / every pooled rows.
    Returns:
        [T, heads * dim] f32.
    """
    pages = cache[0]
    if pooled is not None:
        pages = window_rows(pages, shape.dim, shape.every)
        append_windows(pages, pooled, rows, shape.every)
    rings = state.read((shape.window, shape.dim))
    query = rounded(torch.unflatten(q, -1, (shape.heads, shape.dim)), exact)
    a = _Attending(kv, rings, pages, rows, shape, sinks, chosen, exact)
    out, after = _one(a, query) if rows.single else _runs(a, query)
    state.write(after)
    return out.flatten(1)


def _one(a: _Attending, query: Tensor) -> tuple[Tensor, Tensor]:
    """Attends with one query per sequence, [S, heads, dim]; returns the result, and the rings of the next step."""
    s, at = a.shape, a.rows.positions[:, None]
    place = torch.arange(s.window, device=a.kv.device)
    rings = torch.where((place == at % s.window)[..., None], a.kv[:, None], a.rings)
    keys, seen = [rounded(rings, a.exact)], [(at - place) % s.window <= at]
    if s.every:
        if a.chosen is None:
            count = a.rows.pages.shape[1] * PAGE_TOKENS // s.every
            numbers = torch.arange(count, device=a.kv.device).expand(len(a.kv), -1)
        else:
            numbers = a.chosen.places[:, 0]
        keys.append(windows_at(a.cache, a.rows.pages, numbers, s.every))
        seen.append(numbers < (at + 1) // s.every)
    every, counts = torch.cat(keys, 1), torch.cat(seen, 1)
    # What was not written yet may hold anything, and 0 times NaN is NaN.
    return a.attend(query, every.masked_fill(~counts[..., None], 0.0), counts), rings


def _runs(a: _Attending, query: Tensor) -> tuple[Tensor, Tensor]:
    """Attends with runs of queries, [T, heads, dim], one sequence after the other; returns the result, and the rings
    of the next step."""
    s, run, device = a.shape, a.rows.run, a.kv.device
    out, after, place = torch.empty_like(query), [], torch.arange(s.window, device=device)
    for ring, (of, table) in zip(a.rings, a.rows.sequences, strict=True):
        positions = a.rows.positions[of]
        there = torch.arange(-s.window, run, device=device) + positions[0]
        held = torch.cat((ring[there[: s.window] % s.window], a.kv[of]))  # [window + run, dim]
        held = held.masked_fill((there < 0)[:, None], 0.0)
        newest = positions[-1] - (positions[-1] - place) % s.window
        after.append(held[newest - there[0]])
        keys, numbers = rounded(held, a.exact), torch.arange(0, device=device)
        if s.every:
            numbers = torch.arange(table.shape[0] * PAGE_TOKENS // s.every, device=device)
            is_there = numbers < (positions[-1] + 1) // s.every
            rest = windows_at(a.cache, table, numbers, s.every)
            keys = torch.cat((keys, rest.masked_fill(~is_there[:, None], 0.0)))
        for some in in_blocks(of, _BLOCK_QUERIES):
            at = a.rows.positions[some, None]
            seen = [(there <= at) & (there > at - s.window) & (there >= 0)]
            if s.every:
                complete = numbers < (at + 1) // s.every
                chosen = None if a.chosen is None else a.chosen.mask(some, len(numbers))[0]
                seen.append(complete if chosen is None else complete & chosen)
            out[some] = a.attend(query[some], keys, torch.cat(seen, 1))
    return out, torch.stack(after)
