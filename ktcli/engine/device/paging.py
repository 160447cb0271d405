"""Pages and states of a device on their way to a store, and back: through pinned memory, in a stream of their own.

What is saved is not written any more, and the step that wrote it is done, so its copies wait for no other stream and no
step waits for them; the copying engines of a GPU leave its processors alone. The bytes of a page are those of each
layer's parts, 64 positions of a part behind the other, in the order of the layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from ktcli.engine.device.stream import Stream, device_errors
from ktcli.engine.tier import U8Array


class DevicePages:
    """The memory of pages and states on a device, see `PageMemory`.

    Args:
        parts: the parts of the layers' pages, [pages, elements] each, see `cache.parts_of_pages`.
        states: f32 [slots, elements] of each layer; (): no layer keeps any.
    """

    codec = "gpu"  # the layout: as torch and the kernels of a GPU read them

    def __init__(self, parts: Sequence[Tensor], states: Sequence[Tensor], stream: Stream) -> None:
        self._pages, self._states, self._stream = _Rows(parts), _Rows(states), stream
        self.page_bytes, self.state_bytes = self._pages.size_bytes, self._states.size_bytes
        self._staged = stream.pinned(max(self.page_bytes, self.state_bytes))
        self._guard = threading.Lock()  # of what is staged

    def saved_page(self, page: int) -> U8Array:
        """The bytes of a page; for a sealed one any thread may ask."""
        return self._saved(self._pages, page)

    def saved_state(self, slot: int) -> U8Array:
        """The bytes of a state; for a snapshot any thread may ask."""
        return self._saved(self._states, slot)

    def page_room(self, page: int) -> U8Array:
        """Where the bytes of a page are read to."""
        return np.empty(self.page_bytes, dtype=np.uint8)

    def state_room(self, slot: int) -> U8Array:
        """Where the bytes of a state are read to."""
        return np.empty(self.state_bytes, dtype=np.uint8)

    def restore_page(self, page: int, room: U8Array) -> None:
        """Copies the bytes of a page to its place."""
        self._restore(self._pages, page, room)

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Copies the bytes of a state to its place."""
        self._restore(self._states, slot, room)

    def _saved(self, rows: _Rows, number: int) -> U8Array:
        with self._guard, device_errors("copying pages"):
            for staged, own in rows.pairs(self._staged, number):
                self._stream.copy(staged, own)
            self._stream.synchronize()
            found: U8Array = self._staged[: rows.size_bytes].numpy().copy()
        return found

    def _restore(self, rows: _Rows, number: int, room: U8Array) -> None:
        with self._guard, device_errors("copying pages"):
            self._staged[: rows.size_bytes].numpy()[:] = room
            for staged, own in rows.pairs(self._staged, number):
                self._stream.copy(own, staged)
            self._stream.synchronize()


class _Rows:
    """Tensors [n, elements] whose rows of one number are kept together.

    Attributes:
        size_bytes: the bytes of a row of all of them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [each for each in tensors if each.shape[1]]
        self.size_bytes = sum(each[0].nbytes for each in self._tensors)

    def pairs(self, staged: Tensor, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of a number in pieces: in staged bytes, and in their tensor."""
        first = 0
        for each in self._tensors:
            row = each[number]
            yield staged[first : first + row.nbytes].view(row.dtype), row
            first += row.nbytes
