"""Pages of an fp8 cache: codes, and a scale byte for each head and each position, by the rule of `ops.kvformat`.

All of it is torch operations of fixed shapes, which a CUDA graph can capture. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ktcli.ops.kvformat import MOST
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
        """Returns the same pages with heads of `widths` columns."""
        return replace(self, widths=widths)

    def write(self, page: Tensor, place: Tensor, new: Tensor) -> None:
        """Encodes the rows `new` [T, elements] and writes them to the given pages and places."""
        made = [encode(head) for head in self._split(new.float())]
        self.codes[page, place] = torch.cat([codes.flatten(1) for codes, _ in made], -1)
        self.scales[page, place] = torch.cat([scale for _, scale in made], -1)

    def at(self, table: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Returns the decoded rows of the pages of a table […], [..., 64, elements]."""
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
    """Returns the codes uint8 [..., columns] and scale bytes uint8 [...] of heads, the rows of x f32 [...,
    columns]."""
    most = x.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(-1)
    bits = most.view(torch.int32)
    above = ((bits & 0x7FFFFF) > 0x600000).int()
    scale = ((bits >> 23) - 8 + above).clamp(min=0).masked_fill(most == 0, 0)
    factor = ((254 - scale) << 23).view(torch.float32)  # 2^(127 - scale)
    codes = (x * factor[..., None]).clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(x.isnan(), _NAN).masked_fill((most == 0)[..., None], 0)
    return codes, scale.to(torch.uint8)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the f32 values of heads: the rows of codes [..., columns] times their scales [...]."""
    wide = scale.int()
    unit = torch.where(wide > 0, wide << 23, _HALF_LEAST).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float() * unit[..., None]
