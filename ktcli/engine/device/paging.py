"""Copies pages and states between a device and a store: through pinned memory, in a separate stream.

What is saved is not written any more, and the step that wrote it is done, so its copies wait for no other stream and no
step waits for them; the copying engines of a GPU leave its processors alone. The bytes of a page are those of each
layer's parts, 64 positions of a part behind the other, in the order of the layers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from ktcli.engine.device.segments import by_device
from ktcli.engine.device.stream import Stream, device_errors
from ktcli.pagelabel import U8Array


class DevicePages:
    """The memory of the pages of one kind on a device, see `PagedMemory`.

    Args:
        parts: the parts of the layers' pages, [pages, elements] each, see `DeviceCache.parts`.
    """

    def __init__(self, parts: Sequence[Tensor], streams: Sequence[Stream]) -> None:
        self._pages = _Rows(parts, streams)
        self.page_bytes = self._pages.size_bytes

    def saved_page(self, page: int) -> U8Array:
        """Returns the bytes of a KV-cache page, given by its number, copied to host memory; any thread may ask for a
        sealed page, which is not written any more.
        """
        return self._pages.saved(page)

    def page_room(self, page: int) -> U8Array:
        """Returns new host memory, uint8 [page_bytes], into which a stored page is read before `restore_page` copies it
        to the device.
        """
        return np.empty(self.page_bytes, dtype=np.uint8)

    def restore_page(self, page: int, room: U8Array) -> None:
        """Copies the bytes in `room`, as `page_room` returned it, to the KV-cache page `page` on the device."""
        self._pages.restore(page, room)


class DeviceMemory(DevicePages):
    """The memory of pages and states on a device, see `PageMemory`.

    Args:
        states: f32 [slots, elements] of each layer; (): no layer keeps any.
    """

    codec = "gpu"  # the layout: as torch and the kernels of a GPU read them

    def __init__(
        self, parts: Sequence[Tensor], states: Sequence[Tensor], streams: Sequence[Stream]
    ) -> None:
        super().__init__(parts, streams)
        self._states = _Rows(states, streams)
        self.state_bytes = self._states.size_bytes

    def saved_state(self, slot: int) -> U8Array:
        """Returns the bytes of the recurrent state in a slot, copied to host memory; any thread may ask for a snapshot,
        which is not written any more.
        """
        return self._states.saved(slot)

    def state_room(self, slot: int) -> U8Array:
        """Returns new host memory, uint8 [state_bytes], into which a stored state is read before `restore_state` copies
        it to the device.
        """
        return np.empty(self.state_bytes, dtype=np.uint8)

    def restore_state(self, slot: int, room: U8Array) -> None:
        """Copies the bytes in `room`, as `state_room` returned it, to the state's slot on the device."""
        self._states.restore(slot, room)


class _Rows:
    """Tensors [n, elements] whose rows of one number are kept together.

    Attributes:
        size_bytes: the bytes of a row of all of them.
    """

    def __init__(self, tensors: Sequence[Tensor], streams: Sequence[Stream]) -> None:
        self._tensors = [each for each in tensors if each.shape[1]]
        self.size_bytes = sum(each[0].nbytes for each in self._tensors)
        self._streams, self._staged = by_device(streams), streams[0].pinned(self.size_bytes)
        self._guard = threading.Lock()  # of what is staged

    def saved(self, number: int) -> U8Array:
        """A copy of the rows of a number, uint8 [size_bytes]."""
        with self._guard, device_errors("copying pages"):
            for staged, own in self._pairs(number):
                self._streams[own.device].copy(staged, own)
            self._wait()
            found: U8Array = self._staged.numpy().copy()
        return found

    def restore(self, number: int, room: U8Array) -> None:
        """Copies bytes, as `saved` gave them, to the rows of a number."""
        with self._guard, device_errors("copying pages"):
            self._staged.numpy()[:] = room
            for staged, own in self._pairs(number):
                self._streams[own.device].copy(own, staged)
            self._wait()

    def _wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _pairs(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of a number in pieces: in staged bytes, and in their tensor."""
        first = 0
        for each in self._tensors:
            row = each[number]
            yield self._staged[first : first + row.nbytes].view(row.dtype), row
            first += row.nbytes
