"""The memory of pages and states on the CPU: where each position of each layer lies, and the pools that number it.

A page holds 64 positions of all layers, one layer behind the other, so that a page can leave memory and come back as
one object. All memory is reserved when the engine is made and costs nothing before it is touched; pages are taken as
positions are reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.pages import PagePool, StatePool
from ktcli.engine.sequence import Pools
from ktcli.engine.states import StateLayout
from ktcli.engine.tier import U8Array
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS, Arena
from ktcli.native import Pool as Team
from ktcli.ops.state import SNAPSHOTS, state_slots
from ktcli.ops.tensors import ceil_to
from ktcli.planner.memory import Use

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


class KvCache:
    """The pages and states of an engine, in main memory.

    Attributes:
        layout, states: where each layer's part of a page, and of a state, lies.
        memory: [pages][page_bytes].
        state_memory: [slots][state_bytes].
        pools: who has which of them.
    """

    def __init__(self, spec: Spec, use: Use, context: int, team: Team, seed: bytes) -> None:
        self.layout = PageLayout.of(spec, f32=use.f32_cache)
        self.states = StateLayout.of(spec)
        pages, each = use.pages(context), self.layout.page_bytes
        slots = state_slots(use.streams) if self.states.elements else 0
        self.memory = team.arena(pages * each)
        self.state_memory = team.arena(slots * self.states.size_bytes)
        states = StatePool(slots, SNAPSHOTS, "a conversation", self.states.size_bytes)
        self.pools = Pools(
            PagePool(pages, "the context", each),
            states if slots else None,
            _Copy(_rows(self.memory, pages, each)),
            seed,
            context,
        )

    # -- for the tier below, see `tier.PageMemory`: the bytes lie as they are stored ------------------------

    codec = "cpu"  # the layout: 64 positions of a layer behind the other, as the kernels read them

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def state_bytes(self) -> int:
        return self.states.size_bytes

    def saved_page(self, page: int) -> U8Array:
        return self.memory.bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def saved_state(self, slot: int) -> U8Array:
        return self.state_memory.bytes[slot * self.state_bytes : (slot + 1) * self.state_bytes]

    page_room, state_room = saved_page, saved_state

    def restore_page(self, page: int, room: U8Array) -> None:
        """Does nothing: the room is the place."""

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Does nothing: the room is the place."""


class _Copy:
    """Copies pages."""

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        self._pages = pages

    def __call__(self, of: int, to: int) -> None:
        self._pages[to] = self._pages[of]


def _rows(memory: Arena, n: int, each_bytes: int) -> NDArray[np.uint8]:
    return memory.bytes[: n * each_bytes].reshape(n, each_bytes)
