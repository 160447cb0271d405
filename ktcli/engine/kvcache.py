"""The memory of pages and states on the CPU: the address of each position of each layer, and the pools that number
them.

A page holds 64 positions of all layers that keep whole sequences, one layer behind the other, so that a page can leave
memory and come back as one object; a *window page* holds those of the layers with a window, which need fewer. All
memory is reserved when the engine is made and costs nothing before it is touched; pages are taken as positions are
reached.
"""

from __future__ import annotations

from itertools import accumulate

from ktcli.engine.pages import PagePool
from ktcli.engine.pagetable import WindowPages
from ktcli.engine.pools import Pools
from ktcli.engine.statepool import StatePool
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS
from ktcli.native import Pool as Team
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.ops.state import SNAPSHOTS, state_slots
from ktcli.ops.tensors import ceil_to
from ktcli.pagelabel import U8Array
from ktcli.planner.memory import Use
from ktcli.records import dataclass

_LINE_BYTES = 64  # layers begin on cache lines
_LINE_ELEMENTS = 16  # of states, f32


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The sizes of KV pages.

    Attributes:
        offsets: the first byte of each layer's part of a page, or of a window page.
        page_bytes, window_bytes: the bytes of a page and of a window page, all layers that have a part.
        windowed: the layers whose part is one of a window page.
    """

    offsets: tuple[int, ...]
    page_bytes: int
    window_bytes: int
    windowed: frozenset[int]

    @classmethod
    def of(cls, spec: Spec, fmt: CacheFormat = BF16) -> PageLayout:
        """Returns the layout of a model's KV-cache pages in a number format: the offset of each layer's part, and the
        bytes of a page and of a page of the sliding-window layers.
        """
        ends, offsets = {False: 0, True: 0}, []
        for state in spec.states:
            offsets.append(ends[state.windowed])
            ends[state.windowed] += ceil_to(PAGE_TOKENS * state.position_bytes(fmt), _LINE_BYTES)
        windowed = frozenset(i for i, state in enumerate(spec.states) if state.windowed)
        return cls(tuple(offsets), ends[False], ends[True], windowed)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The layout of a state: the offset of each layer's part.

    Attributes:
        offsets: the first f32 element of each layer's part.
        elements: the f32 elements of a whole state.
    """

    offsets: tuple[int, ...]
    elements: int

    @property
    def size_bytes(self) -> int:
        """The bytes of one recurrent state, of all layers that keep one."""
        return 4 * self.elements

    @classmethod
    def of(cls, spec: Spec) -> StateLayout:
        """Returns the layout of a model's recurrent states: the offset of each layer's part and the size of a whole
        state, in f32 elements.
        """
        sizes = [ceil_to(s.sequence_elements, _LINE_ELEMENTS) for s in spec.states]
        ends = tuple(accumulate(sizes))
        return cls((0, *ends[:-1]), ends[-1])


class PageArena:
    """The pages of one kind in main memory, in the layout in which they are stored.

    Attributes:
        arena: [pages][page_bytes].
    """

    def __init__(self, team: Team, pages: int, page_bytes: int) -> None:
        self.page_bytes, self.arena = page_bytes, team.arena(pages * page_bytes)

    def saved_page(self, page: int) -> U8Array:
        """Returns the bytes of the KV-cache page with this number, [page_bytes], as a writable view of the arena."""
        return self.arena.bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    page_room = saved_page

    def restore_page(self, page: int, room: U8Array) -> None:
        """Does nothing: `room` is the page's own memory, so its bytes are already in place."""

    def copy(self, of: int, to: int) -> None:
        """Copies the contents of KV-cache page `of` to page `to`."""
        self.saved_page(to)[:] = self.saved_page(of)


class KvCache:
    """The pages and states of an engine, in main memory.

    Attributes:
        layout, states: where each layer's part of a page, and of a state, lies.
        memory: the pages.
        windows: the pages of the layers with a window; None: no layer has one.
        state_memory: [slots][state_bytes].
        pools: who has which of them.
    """

    def __init__(self, spec: Spec, use: Use, context: int, team: Team, seed: bytes) -> None:
        self.layout = layout = PageLayout.of(spec, use.cache_format)
        self.states = StateLayout.of(spec)
        pages, window_pages = use.pages(context), use.window_pages(spec, context)
        slots = state_slots(use.streams) if self.states.elements else 0
        self.memory = PageArena(team, pages, layout.page_bytes)
        self.windows = PageArena(team, window_pages, layout.window_bytes) if spec.window else None
        self.state_memory = team.arena(slots * self.states.size_bytes)
        states = StatePool(slots, SNAPSHOTS, "a conversation", self.states.size_bytes)
        windows = None
        if self.windows is not None:
            pool = PagePool(window_pages, "the windows", layout.window_bytes)
            windows = WindowPages(pool, self.windows.copy, spec.window, self.windows)
        self.pools = Pools(
            PagePool(pages, "the context", layout.page_bytes),
            states if slots else None,
            self.memory.copy,
            seed,
            context,
            windows=windows,
            latent=spec.latent,
        )

    # -- for the tier below, see `tier.PageMemory`: the bytes lie as they are stored ------------------------

    codec = "cpu"  # the layout: 64 positions of a layer behind the other, as the kernels read them

    @property
    def page_bytes(self) -> int:
        """The bytes of a KV-cache page, in memory as in a store."""
        return self.layout.page_bytes

    @property
    def state_bytes(self) -> int:
        """The bytes of a recurrent state, of all layers, in memory as in a store."""
        return self.states.size_bytes

    def saved_page(self, page: int) -> U8Array:
        """Returns the bytes of the KV-cache page with this number, [page_bytes], as a writable view of the cache."""
        return self.memory.saved_page(page)

    def saved_state(self, slot: int) -> U8Array:
        """Returns the bytes of the recurrent state in a slot, [state_bytes], as a writable view of the cache."""
        return self.state_memory.bytes[slot * self.state_bytes : (slot + 1) * self.state_bytes]

    page_room, state_room = saved_page, saved_state

    def restore_page(self, page: int, room: U8Array) -> None:
        """Does nothing: `room` is the page's own memory, so its bytes are already in place."""

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Does nothing: `room` is the slot's own memory, so the state's bytes are already in place."""
