"""The KV cache on a device: one pool of pages for all sequences, one of window pages, and one of states.

A page is 64 positions of all layers that keep whole sequences, a window page those of the layers with a window. Each
layer's part of all its pages lies together, flat; the backend shows it as K and V or as latents. States belong to
layers that cache no positions. Pages start as zeros and are not cleared between sequences: a position is read only
after it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import torch

from ktcli.engine.device.segments import by_device
from ktcli.engine.device.stream import Stream, device_errors
from ktcli.engine.pages import PagePool
from ktcli.engine.statepool import StatePool
from ktcli.models import Spec
from ktcli.native import PAGE_TOKENS
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.ops.operation import layout_of
from ktcli.ops.recording import Recording
from ktcli.ops.state import SNAPSHOTS, state_slots
from ktcli.ops.tensors import ceil_to

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "fp8": torch.uint8}
_ALIGNMENT = 256  # bytes; layers begin at multiples of it


class DeviceCache:
    """The pages and states of all sequences in device memory.

    Args:
        pages: the number of pages that sequences can have together.
        devices: the device of each layer.
        windows: the number of window pages; 0: the layers with a window have their part of the other pages.
        slots: the number of states that they can have together, snapshots included; None: those of one sequence.
        fmt: the number format of what is cached.
    Attributes:
        layers: a flat tensor for each layer, 64 * position_elements elements per page, or window page;
            bytes, of codes and scales, if the format has scales.
        windowed: the layers whose part is one of a window page.
        states: a tensor for each layer, f32 [slots + 1, sequence_elements]; () if no layer keeps any.
        scratch, window_scratch, scratch_slot: one page of each kind and one slot more, for rows of a step that belong
            to no sequence.
        pages, windows, slots: who has which; windows None: there are no window pages.
        size_bytes: the bytes of all pages and states.
    Raises:
        torch.OutOfMemoryError: the device has not so much.
    """

    def __init__(
        self,
        spec: Spec,
        pages: int,
        devices: Sequence[torch.device],
        *,
        windows: int = 0,
        slots: int | None = None,
        fmt: CacheFormat = BF16,
    ) -> None:
        dtype = _DTYPES[fmt.name]
        self.windowed = frozenset(
            i for i, state in enumerate(spec.states) if windows and state.windowed
        )
        self._counts = [
            (windows if i in self.windowed else pages) + 1 for i in range(len(spec.states))
        ]
        each = [PAGE_TOKENS * state.position_bytes(fmt) // dtype.itemsize for state in spec.states]
        sizes = [count * size for count, size in zip(self._counts, each, strict=True)]
        rows = [ceil_to(size, _ALIGNMENT // dtype.itemsize) for size in sizes]
        memory = _zeros(rows, devices, dtype)
        self.layers = tuple(row[:size] for row, size in zip(memory, sizes, strict=True))
        slots = state_slots() if slots is None else slots
        self.states = _states(spec, slots + 1, devices)
        self.size_bytes = sum(rows) * dtype.itemsize + sum(s.nbytes for s in self.states)
        self.scratch, self.window_scratch, self.scratch_slot = pages, windows, slots
        what, window_bytes = "the context on the GPU", sum(each[i] for i in self.windowed)
        self.pages = PagePool(pages, what, (sum(each) - window_bytes) * dtype.itemsize)
        self.windows: PagePool | None = None
        if self.windowed:
            self.windows = PagePool(
                windows, "the windows on the GPU", window_bytes * dtype.itemsize
            )
        self.slots = StatePool(slots, min(SNAPSHOTS, slots), what, 4 * spec.sequence_elements)

    def parts(
        self, widths: Sequence[Sequence[int]], *, windowed: bool = False
    ) -> list[torch.Tensor]:
        """Returns views [pages, elements] of the KV-cache pages, the scratch page included: one tensor for each part of
        each layer, such as its keys, in the order of the layers; only the layers with window pages if `windowed`, else
        only the others.

        Args:
            widths: for each layer, the elements per position of each part, see `cached_parts`.
        """
        return [
            part.view(count, -1)
            for i, (layer, count) in enumerate(zip(self.layers, self._counts, strict=True))
            if (i in self.windowed) == windowed
            for part in torch.split(layer, [count * PAGE_TOKENS * width for width in widths[i]])
        ]


class PageCopy:
    """Copies pages in the stream that reads and writes them.

    Args:
        parts: the parts of the layers' pages of one kind, see `DeviceCache.parts`.
        streams: a stream of each device.
    """

    def __init__(self, parts: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        self._parts, self._streams = parts, by_device(streams)

    def __call__(self, of: int, to: int) -> None:
        """Copies page `of` to page `to`.

        Raises:
            DeviceError: the device failed.
        """
        with device_errors("copying pages"):
            for part in self._parts:
                with self._streams[part.device].running():
                    part[to].copy_(part[of])


def cached_parts(recording: Recording, layers: int, fmt: CacheFormat = BF16) -> list[list[int]]:
    """Returns for each layer a list: the number of elements per position of each part, such as keys and values, of its
    KV-cache pages, in the order in which the parts lie there; then, if the format has scales, the number of scales per
    position of each part.
    """
    scales: list[list[int]] = [[] for _ in range(layers)]
    cuts: list[set[int]] = [{0} for _ in range(layers)]
    for each in recording.records:
        name = layout_of(type(each.operation)).pages
        if name:
            cached = each.operation.cached
            ends = accumulate((cached.before, *cached.parts, cached.behind))
            layer = getattr(each.operation, name)
            cuts[layer].update(ends)
            scales[layer] = list(cached.heads) if fmt.scale_bytes else []
    return [
        [b - a for a, b in pairwise(sorted(ends))] + own
        for ends, own in zip(cuts, scales, strict=True)
    ]


def _zeros(
    sizes: Sequence[int], devices: Sequence[torch.device], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Zeros of these sizes, each on its device: one allocation for neighbours."""
    found: list[torch.Tensor] = []
    for device, group in groupby(zip(devices, sizes, strict=True), key=lambda each: each[0]):
        own = [size for _, size in group]
        found += torch.split(torch.zeros(sum(own), dtype=dtype, device=device), own)
    return found


def _states(spec: Spec, slots: int, devices: Sequence[torch.device]) -> tuple[torch.Tensor, ...]:
    """The states of every layer, f32 [slots, elements]."""
    if not spec.sequence_elements:
        return ()
    elements = [state.sequence_elements for state in spec.states]
    return tuple(
        torch.zeros(slots, n, dtype=torch.float32, device=device)
        for n, device in zip(elements, devices, strict=True)
    )
