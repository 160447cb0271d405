"""The paged KV cache: where each position of each layer lies.

A page holds 64 positions of all layers, one layer behind the other, so that a page can leave memory and
come back as one object. Pages are reserved when a session starts; nothing is allocated per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktcli.layers.tensors import ceil_to
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS, Arena

_LINE_BYTES = 64  # layers begin on cache lines


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sizes of a KV page.

    Attributes:
        layer_bytes: one layer's part of a page.
        page_bytes: all layers.
    """

    layer_bytes: int
    page_bytes: int

    @classmethod
    def of(cls, spec: Spec, *, exact: bool = False) -> PageLayout:
        """bf16 elements; f32 when exact."""
        layer_bytes = ceil_to(PAGE_TOKENS * spec.kv_elements * (4 if exact else 2), _LINE_BYTES)
        return cls(layer_bytes, layer_bytes * spec.layers)

    def cache_bytes(self, context: int) -> int:
        """Memory of a cache for `context` positions."""
        return pages_for(context) * self.page_bytes


def pages_for(positions: int) -> int:
    """Pages that hold this many positions."""
    return -(-positions // PAGE_TOKENS)


class KvCache:
    """The pages of one session.

    Attributes:
        memory: [pages][page_bytes], `cache_bytes` of the layout; untouched pages cost nothing.
        table: int32 cache page of each run of 64 positions.
    """

    def __init__(self, layout: PageLayout, context: int, memory: Arena) -> None:
        self.layout = layout
        self.memory = memory
        self.table: NDArray[np.int32] = np.arange(pages_for(context), dtype=np.int32)
