"""The KV cache on a device: one pool of pages for all sessions, handed out from a free list, and one of states.

A page is 64 positions of every layer. Each layer's part of all pages lies together, flat; the backend shows it
as K and V or as latents. States belong to layers that cache no positions. Pages start as zeros and are not cleared
between sessions: a position is read only after it was written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ktcli.errors import NotEnoughMemory
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS
from ktcli.ops.state import STATE_SLOTS
from ktcli.ops.tensors import ceil_to

_ALIGNMENT = 256  # bytes; layers begin at multiples of it


class FreeList:
    """The free numbers of equal things, of which sessions take some.

    Args:
        what: their name in an error.
        each_bytes: the bytes of one.
    """

    def __init__(self, count: int, what: str, each_bytes: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._what, self._each_bytes = what, each_bytes

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Takes `count` of the numbers.

        Raises:
            NotEnoughMemory: fewer are free; none was taken.
        """
        if count > len(self._free):
            need, have = (n * self._each_bytes for n in (count, len(self._free)))
            raise NotEnoughMemory(self._what, need, have)
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Returns numbers to the list."""
        self._free.extend(numbers)


class DeviceCache:
    """Pages and states in device memory.

    Args:
        pages: the number of pages that sessions can have together.
        slots: the number of states that they can have together.
        exact: whether elements are f32 instead of bf16.
    Attributes:
        layers: a flat tensor for each layer, 64 * position_elements elements per page.
        states: a tensor for each layer, f32 [slots + 1, sequence_elements]; () if no layer keeps any.
        scratch, scratch_slot: one page and one slot more, for rows of a step that belong to no session.
        pages, slots: the free ones.
        page_bytes: the bytes of a page, all layers.
        size_bytes: the bytes of all pages and states.
    Raises:
        torch.OutOfMemoryError: the device has not so much.
    """

    def __init__(
        self,
        spec: Spec,
        pages: int,
        device: torch.device,
        *,
        slots: int = STATE_SLOTS,
        exact: bool = False,
    ) -> None:
        dtype = torch.float32 if exact else torch.bfloat16
        sizes = [(pages + 1) * PAGE_TOKENS * state.position_elements for state in spec.states]
        rows = [ceil_to(size, _ALIGNMENT // dtype.itemsize) for size in sizes]
        self.page_bytes = PAGE_TOKENS * spec.position_elements * dtype.itemsize
        memory = torch.split(torch.zeros(sum(rows), dtype=dtype, device=device), rows)
        self.layers = tuple(row[:size] for row, size in zip(memory, sizes, strict=True))
        self.states = _states(spec, slots + 1, device)
        self.size_bytes = sum(rows) * dtype.itemsize + sum(s.nbytes for s in self.states)
        self.scratch, self.scratch_slot = pages, slots
        what = "the context on the GPU"
        self.pages = FreeList(pages, what, self.page_bytes)
        self.slots = FreeList(slots, what, 4 * spec.sequence_elements)


def _states(spec: Spec, slots: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The states of every layer, f32 [slots, elements]."""
    if not spec.sequence_elements:
        return ()
    elements = [state.sequence_elements for state in spec.states]
    return tuple(torch.zeros(slots, n, dtype=torch.float32, device=device) for n in elements)
