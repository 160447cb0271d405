"""The paged KV cache: the place of each position of each layer.

A page holds 64 positions of all layers, one layer behind the other, so that a page can leave memory and
come back as one object. Pages are reserved when a session starts; nothing is allocated per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS, Arena
from ktcli.ops.tensors import ceil_to

_LINE_BYTES = 64  # layers begin on cache lines


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The sizes of a KV page.

    Attributes:
        offsets: the first byte of each layer's part of a page.
        page_bytes: the bytes of a page, all layers.
    """

    offsets: tuple[int, ...]
    page_bytes: int

    @classmethod
    def of(cls, spec: Spec, *, f32: bool = False) -> PageLayout:
        """The layout of a model's pages with bf16 elements, or f32."""
        each = PAGE_TOKENS * (4 if f32 else 2)
        sizes = [ceil_to(s.position_elements * each, _LINE_BYTES) for s in spec.states]
        ends = tuple(accumulate(sizes))
        return cls((0, *ends[:-1]), ends[-1])

    def cache_bytes(self, context: int) -> int:
        """The bytes of a cache for `context` positions."""
        return pages_for(context) * self.page_bytes


def pages_for(positions: int) -> int:
    """The number of pages that hold `positions` positions."""
    return -(-positions // PAGE_TOKENS)


class KvCache:
    """The pages of one session.

    Attributes:
        memory: [pages][page_bytes], `cache_bytes` of the layout; untouched pages cost nothing.
        table: the cache page of each run of 64 positions, int32.
    """

    def __init__(self, layout: PageLayout, context: int, memory: Arena) -> None:
        self.layout = layout
        self.memory = memory
        self.table: NDArray[np.int32] = np.arange(pages_for(context), dtype=np.int32)
