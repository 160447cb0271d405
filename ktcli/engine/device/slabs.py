"""Copies experts from main memory to the device: slabs through a double buffer.

A slab is as many experts of one layer as its buffer holds. While the device computes with one slab, the next is on the
link, from where its experts lie if that is pinned; else the one after it is being gathered in pinned memory. The order
of slabs is known beforehand, over all layers, so that the link never waits for a router.

Experts lie in main memory as the nodes' slices, cut by width. A slice is an expert of its own, only narrower, and the
slices' results are added up; so nothing is put together again on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.engine.device.experts import LayerWeights
from ktcli.engine.device.pinnedweights import PinnedWeights
from ktcli.engine.device.stream import Mark, Stream
from ktcli.engine.loader import runs_of
from ktcli.native import Pool, Weight, packed_bytes
from ktcli.ops.tensors import ceil_to
from ktcli.ops.torch.packed import Packed, PackedStack
from ktcli.records import dataclass

_LINE_BYTES = 256  # each stack in a slab begins where loads of any width are aligned


@dataclass(frozen=True, slots=True)
class Slab:
    """A group of experts of one layer that are copied together, all slices of each.

    Attributes:
        experts: their ids, ascending.
    """

    layer: int
    weights: LayerWeights
    experts: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes that the weights of the slab's experts take in its buffer, with the padding that aligns them."""
        return sum(padded for _, _, padded in self._places())

    def gather(self, memory: Tensor, pool: Pool) -> None:
        """Copies the weights of the slab's experts from where they lie in main memory to `memory`, a uint8 tensor in
        host memory, in the slab's layout, with all threads of the pool.
        """
        assert memory.nbytes >= self.size_bytes
        to = memory.data_ptr()
        pool.copy([(to + first, source, size) for first, source, size in self.pieces()])

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yields a tuple (offset in the slab, address in main memory, bytes) for each run of consecutive experts in
        each weight tensor, in the order in which they are copied.
        """
        for weight, first, _ in self._places():
            size = _matrix_bytes(weight)
            for run in runs_of(self.experts):
                yield first, weight.address + run.start * size, len(run) * size
                first += len(run) * size

    def stacks(self, memory: Tensor, slots: Tensor) -> list[PackedStack]:
        """Returns the slab's experts as kernels read them, as views of `memory`: for each NUMA node's slice of the
        experts a `PackedStack` with the matrices gate_up and down, in the order of `experts`.

        Args:
            memory: uint8, on the device: what `gather` has copied.
            slots: what `slots` returns, on the device.
        """
        packed = []
        for weight, first, _ in self._places():
            size = _matrix_bytes(weight)
            rows = memory[first : first + len(self.experts) * size]
            packed.append(Packed(weight.format, weight.n, weight.k, rows.view(-1, size)))
        pairs = zip(packed[::2], packed[1::2], strict=True)
        return [
            PackedStack(slots, gate_up, down, extras)
            for (gate_up, down), extras in zip(pairs, self.weights.slice_extras, strict=True)
        ]

    def slots(self, experts: int) -> Tensor:
        """Returns the index of each of a layer's experts in the slab's stacks, int32 [experts]; -1: the expert is not
        in the slab.
        """
        found = torch.full((experts,), -1, dtype=torch.int32)
        found[list(self.experts)] = torch.arange(len(self.experts), dtype=torch.int32)
        return found

    def _places(self) -> Iterator[tuple[Weight, int, int]]:
        """Yields every stack: its weight, its first byte, and the bytes to the next."""
        at = 0
        for gate_up, down in zip(self.weights.gate_up, self.weights.down, strict=True):
            for weight in (gate_up, down) if down.k else ():
                size = ceil_to(len(self.experts) * _matrix_bytes(weight), _LINE_BYTES)
                yield weight, at, size
                at += size


def spans_of(layer: LayerWeights, experts: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields an address range in main memory, (first byte, byte behind the last), for each run of consecutive experts
    of a layer that are true in `experts` [E], in each of the layer's weight tensors.
    """
    ids = tuple(np.flatnonzero(experts).tolist())
    for _, address, size in Slab(0, layer, ids).pieces():
        yield address, address + size


def slabs_of(
    layers: Sequence[LayerWeights | None], wanted: NDArray[np.bool_], size_bytes: int
) -> tuple[Slab, ...]:
    """Returns the wanted experts, those true in [layers, experts], divided into slabs: groups of one layer's experts
    that are copied together, each of at most `size_bytes` but at least one expert. Layers without weights here are left
    out.
    """
    found = []
    for i, weights in enumerate(layers):
        if weights is not None:
            ids = np.flatnonzero(wanted[i]).tolist()
            most = max(1, size_bytes // Slab(i, weights, (0,)).size_bytes)
            found += [Slab(i, weights, tuple(ids[k : k + most])) for k in range(0, len(ids), most)]
    return tuple(found)


class SlabStream:
    """Copies slabs to the device in their order, one ahead.

    Args:
        pool: gathers the slabs; nothing else uses it between `begin` and the last slab.
        compute: the stream in which the slabs are used.
        copies: a second stream of the same device.
        experts: the number of experts of a layer.
        pinned: the weights that may be copied from where they lie.
    """

    def __init__(
        self,
        slabs: Sequence[Slab],
        pool: Pool,
        compute: Stream,
        copies: Stream,
        experts: int,
        pinned: PinnedWeights,
    ) -> None:
        self._slabs, self._pool, self._pinned = slabs, pool, pinned
        self._compute, self._copies = compute, copies
        size = max((slab.size_bytes for slab in slabs), default=0)
        self._device = [torch.empty(size, dtype=torch.uint8, device=compute.device) for _ in "ab"]
        self._staged = [compute.pinned(size) for _ in "ab"]
        self._slots = [slab.slots(experts).to(compute.device) for slab in slabs]
        self._copied: list[Mark | None] = [None, None]
        self._used: list[Mark | None] = [None, None]
        self._loaded = self._taken = 0

    def begin(self) -> None:
        """Starts copying the first two slabs, groups of experts, from main memory to the device, for another pass over
        all slabs. The compute stream must be idle.
        """
        self._copies.synchronize()  # a step that was broken off may have left a copy without its mark
        self._loaded = self._taken = 0
        self._pinned.begin()
        self._load()
        self._load()

    def of_layer(self, layer: int) -> Iterator[list[PackedStack]]:
        """Yields, for each slab of a layer, its experts on the device: a list of one `PackedStack` for each NUMA node's
        slice. The work with one slab must be in the stream before the next is asked for.
        """
        while self._taken < len(self._slabs) and self._slabs[self._taken].layer == layer:
            which, slab = self._taken % 2, self._slabs[self._taken]
            copied = self._copied[which]
            assert copied is not None
            self._compute.after(copied)
            yield slab.stacks(self._device[which], self._slots[self._taken])
            self._used[which] = self._compute.mark()
            self._taken += 1
            self._load()

    def _load(self) -> None:
        """Starts the copies of the next slab."""
        if self._loaded == len(self._slabs):
            return
        which, slab = self._loaded % 2, self._slabs[self._loaded]
        sources = self._where_they_lie(slab) or self._gathered(slab, which)
        if (used := self._used[which]) is not None:
            self._copies.after(used)
        for first, source in sources:
            self._copies.copy(self._device[which][first : first + source.nbytes], source)
        self._copied[which] = self._copies.mark()
        self._loaded += 1

    def _where_they_lie(self, slab: Slab) -> list[tuple[int, Tensor]]:
        """The first byte of each piece in the slab, and the piece in main memory; none if not all are pinned."""
        found = []
        for first, address, size in slab.pieces():
            if (sources := self._pinned.sources(address, size)) is None:
                return []
            for source in sources:
                found.append((first, source))
                first += source.nbytes
        return found

    def _gathered(self, slab: Slab, which: int) -> list[tuple[int, Tensor]]:
        """The slab as one piece, gathered in a pinned buffer."""
        if (copied := self._copied[which]) is not None:
            copied.wait()  # the slab that was staged here before is on the device by now
        slab.gather(self._staged[which], self._pool)
        return [(0, self._staged[which][: slab.size_bytes])]


def _matrix_bytes(weight: Weight) -> int:
    return packed_bytes(weight.format, weight.n, weight.k)
