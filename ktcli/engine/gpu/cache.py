"""The KV cache on a device: one pool of pages for all sessions, handed out from a free list.

A page is 64 positions of every layer. Each layer's part of all pages lies together, flat; the backend shows it
as K and V or as latents. Pages start as zeros and are not cleared between sessions: nobody looks at a
position that was not written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ktcli.errors import NotEnoughMemory
from ktcli.layers.tensors import ceil_to
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS

_ALIGNMENT = 256  # bytes: layers begin so


class DeviceCache:
    """Pages in device memory.

    Args:
        pages: that sessions can have together.
        exact: f32 elements instead of bf16.
    Attributes:
        layers: of each layer a flat tensor of 64 * position_elements elements per page.
        scratch: a page beyond those, for rows of a step that belong to no session.
        page_bytes: of a page, all layers.
        size_bytes: of all pages.
    Raises:
        torch.OutOfMemoryError: the device has not so much.
    """

    def __init__(
        self, spec: Spec, pages: int, device: torch.device, *, exact: bool = False
    ) -> None:
        dtype = torch.float32 if exact else torch.bfloat16
        sizes = [(pages + 1) * PAGE_TOKENS * state.position_elements for state in spec.states]
        rows = [ceil_to(size, _ALIGNMENT // dtype.itemsize) for size in sizes]
        self.page_bytes = PAGE_TOKENS * spec.position_elements * dtype.itemsize
        self.size_bytes = sum(rows) * dtype.itemsize
        memory = torch.split(torch.zeros(sum(rows), dtype=dtype, device=device), rows)
        self.layers = tuple(row[:size] for row, size in zip(memory, sizes, strict=True))
        self.scratch = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Pages for a session.

        Raises:
            NotEnoughMemory: so many are not free; none was taken.
        """
        if count > len(self._free):
            need, have = (n * self.page_bytes for n in (count, len(self._free)))
            raise NotEnoughMemory("the context on the GPU", need, have)
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, pages: Iterable[int]) -> None:
        """Pages that a session has no more use for."""
        self._free.extend(pages)
