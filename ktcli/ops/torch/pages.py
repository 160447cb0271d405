"""Locates rows in the pages of a layer's cache: parts, addresses, and rows of windows.

A layer's cache is flat memory of all its pages, divided into parts, each of all pages at once, one behind the other. An
operation has parts of its own (`Operation.cached`). In an fp8 cache the flat memory is bytes: the codes of the parts,
and behind them the scale byte of each head at each position, part by part (`ScaledPages`), by the rule of
`ops.kvformat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ktcli.native import PAGE_TOKENS
from ktcli.ops.kvformat import MOST
from ktcli.ops.operation import Cached
from ktcli.ops.torch.functions import Rows
from ktcli.records import dataclass

_NAN = 0x7F
_HALF_LEAST = 0x400000  # the bits of 2^-127, which is subnormal: the value of scale byte 0


@dataclass(frozen=True, slots=True)
class ScaledPages:
    """One part of a layer's pages in an fp8 cache.

    Attributes:
        codes: uint8 [pages, 64, elements].
        scales: uint8 [pages, 64, heads].
        widths: the columns of each head; (): all have as many.
    """

    codes: Tensor
    scales: Tensor
    widths: tuple[int, ...] = ()

    def of_heads(self, *widths: int) -> ScaledPages:
        """Returns the same fp8 pages, in the same memory, with each position's row divided into heads of `widths`
        columns that have a scale each.
        """
        return replace(self, widths=widths)

    def write(self, page: Tensor, place: Tensor, new: Tensor) -> None:
        """Encodes the rows `new` [T, elements] as fp8 and writes each to its page (`page`, [T]) and place in the page
        (`place`, [T]).
        """
        made = [encode(head) for head in self._split(new.float())]
        self.codes[page, place] = torch.cat([codes.flatten(1) for codes, _ in made], -1)
        self.scales[page, place] = torch.cat([scale for _, scale in made], -1)

    def at(self, table: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Returns the decoded rows of the fp8 pages whose numbers are in `table` […], as [..., 64, elements] of
        `dtype`.
        """
        scales = torch.split(self.scales[table], [len(w) for w in self._heads()], -1)
        heads = zip(self._split(self.codes[table]), scales, strict=True)
        return torch.cat([decode(*head).flatten(-2) for head in heads], -1).to(dtype)

    def _heads(self) -> list[tuple[int, ...]]:
        """The widths of heads, those that have as many columns together."""
        return [(w,) for w in self.widths] or [(0,) * self.scales.shape[-1]]

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """Rows [..., elements] as heads [..., heads, columns], those that have as many columns together."""
        if not self.widths:
            return (torch.unflatten(rows, -1, (self.scales.shape[-1], -1)),)
        return [each[..., None, :] for each in torch.split(rows, list(self.widths), -1)]


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns heads in fp8: the E4M3 codes, uint8 [..., columns], and scale bytes, uint8 [...], of x f32 [...,
    columns], of which each row is a head.
    """
    most = x.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(-1)
    bits = most.view(torch.int32)
    above = ((bits & 0x7FFFFF) > 0x600000).int()
    scale = ((bits >> 23) - 8 + above).clamp(min=0).masked_fill(most == 0, 0)
    factor = ((254 - scale) << 23).view(torch.float32)  # 2^(127 - scale)
    codes = (x * factor[..., None]).clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(x.isnan(), _NAN).masked_fill((most == 0)[..., None], 0)
    return codes, scale.to(torch.uint8)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the f32 values of fp8 heads, [..., columns]: their codes uint8 [..., columns] times their scales, uint8
    [...].
    """
    wide = scale.int()
    unit = torch.where(wide > 0, wide << 23, _HALF_LEAST).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float() * unit[..., None]


Pages = Tensor | ScaledPages  # [pages, 64, elements]
KvPages = tuple[Pages, Pages]  # of keys and values


def own_parts(flat: Tensor, cached: Cached) -> tuple[Pages, ...]:
    """Returns the parts of a layer's cache (`flat`, its memory) that belong to one operation, such as keys and values,
    as views [pages, 64, elements]; in an fp8 cache as `ScaledPages`.
    """
    if flat.dtype == torch.uint8:
        assert not cached.before and not cached.behind, "no layer that chooses has an fp8 cache"
        own = _parts(flat, (*cached.parts, *cached.heads))
        return tuple(map(ScaledPages, own[: len(cached.parts)], own[len(cached.parts) :]))
    return _parts(flat, (cached.before, *cached.parts, cached.behind))[1:-1]


def _parts(flat: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Divides flat memory of pages into parts [pages, 64, width]."""
    pages = flat.shape[0] // (PAGE_TOKENS * max(1, sum(widths)))
    parts = torch.split(
        flat[: pages * PAGE_TOKENS * sum(widths)], [pages * PAGE_TOKENS * n for n in widths]
    )
    return tuple(part.view(pages, PAGE_TOKENS, n) for part, n in zip(parts, widths, strict=True))


def window_rows(part: Tensor, dim: int, every: int) -> Tensor:
    """Returns the pooled rows at the beginning of each page of a part [pages, 64, …] of a layer's cache, as a view
    [pages, R, dim], where R = 64 / every, at least 1.
    """
    rows = max(1, PAGE_TOKENS // every)
    return torch.unflatten(part.flatten(1)[:, : rows * dim], 1, (rows, dim))


def append_heads(cache: KvPages, k: Tensor, v: Tensor, rows: Rows) -> None:
    """Writes the keys k and values v, each [T, elements], to the cached pages at the positions of their rows."""
    for pages, new in zip(cache, (k, v), strict=True):
        append(pages, new, rows)


def append(pages: Pages, new: Tensor, rows: Rows) -> None:
    """Writes the rows `new` [T, …] to the cached pages [pages, 64, …] at their positions,
    encoded if the cache is fp8.
    """
    table = rows.pages.repeat_interleave(rows.run, 0) if rows.run > 1 else rows.pages
    page = table.gather(1, (rows.positions // PAGE_TOKENS)[:, None])[:, 0].long()
    place = rows.positions % PAGE_TOKENS
    if isinstance(pages, ScaledPages):
        pages.write(page, place, new)
    else:
        pages[page, place] = new.to(pages.dtype)


def plain(pages: Pages) -> Tensor:
    """Returns `pages` itself after asserting that it is a tensor of plain numbers, not fp8."""
    assert isinstance(pages, Tensor)
    return pages


def of_columns(pages: Pages, *widths: int) -> Pages:
    """Returns `pages` with each position's row divided into heads of `widths` columns, which have a scale each in an
    fp8 cache; plain pages are returned as they are.
    """
    if isinstance(pages, Tensor):
        return pages
    return pages.of_heads(*(width for width in widths if width))


def memory_of(pages: Pages) -> tuple[Tensor, Tensor | None]:
    """Returns the tensors that hold the pages: their numbers and None, or in an fp8 cache their
    codes and their scales.
    """
    return (pages, None) if isinstance(pages, Tensor) else (pages.codes, pages.scales)


def held_at(pages: Pages, table: Tensor) -> Tensor:
    """Returns all cached rows of the pages in page tables [S, P], decoded to f32 [S, L, elements], L = 64 P."""
    if isinstance(pages, ScaledPages):
        return pages.at(table.long(), torch.float32).flatten(1, 2)
    return pages[table.long()].flatten(1, 2).float()


def append_windows(cache: Tensor, new: Tensor, rows: Rows, every: int) -> None:
    """Writes to cache [pages, R, dim] those of the pooled rows `new` [T, dim] that complete a window of `every`
    positions, each in its window's place. It does not wait for the device.
    """
    most = -(-rows.run // every)
    start = rows.positions.view(-1, rows.run)[:, :1]
    after = every - 1 - start % every + every * torch.arange(most, device=new.device)
    is_last, after = after < rows.run, after.clamp(max=rows.run - 1)
    last = start + after
    page, row = rows.pages.gather(1, last // PAGE_TOKENS).long(), last % PAGE_TOKENS // every
    given = torch.unflatten(new, 0, (-1, rows.run)).to(cache.dtype)
    complete = given.gather(1, after[:, :, None].expand(-1, -1, new.shape[-1]))
    cache[page, row] = torch.where(is_last[:, :, None], complete, cache[page, row])


def windows_at(cache: Tensor, table: Tensor, numbers: Tensor, every: int) -> Tensor:
    """Returns the cached pooled rows of the windows with the given `numbers`, int64 [..., M], as [..., M, dim] f32, by
    a page table [..., P]; numbers beyond the table give its last window.
    """
    last = ((numbers + 1) * every - 1).clamp(max=table.shape[-1] * PAGE_TOKENS - 1)
    page = table.expand(*last.shape[:-1], -1).gather(-1, last // PAGE_TOKENS).long()
    return cache[page, last % PAGE_TOKENS // every].float()


def held_by(pages: Pages, table: Tensor, positions: Tensor) -> Tensor:
    """Returns the cached rows of one sequence, whose page table is `table`, in order of position, [L, elements]; rows
    after the last of `positions` are 0.
    """
    own = table.long()
    held = (pages.at(own) if isinstance(pages, ScaledPages) else pages[own]).flatten(0, 1)
    behind = torch.arange(held.shape[0], device=held.device) > positions[-1]
    return held.masked_fill_(behind.view(-1, *[1] * (held.dim() - 1)), 0.0)
