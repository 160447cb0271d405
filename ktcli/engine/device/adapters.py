"""The adapters of an engine with a device: the updates of one at a time are beside the products of its steps.

Buffers for the factors are made once, for the products and ranks that the plan has room for, and stay where they are:
captured steps read them. Between two steps of different adapters the values change, by one copy from pinned memory for
each device; rows without an adapter have zeros. Experts in main memory have the updates of all, and their steps name
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ktcli.engine.adapters import ProgramUpdates
from ktcli.engine.device.experts import HostExperts
from ktcli.engine.device.segments import Segment, running
from ktcli.engine.device.stream import Stream
from ktcli.engine.logits import Logits
from ktcli.models import Model
from ktcli.native import Batch
from ktcli.ops.native import multiplied, replaceable
from ktcli.ops.operation import Operation
from ktcli.ops.recording import record
from ktcli.ops.tensors import Role
from ktcli.ops.torch.backend import Weights
from ktcli.ops.torch.lowrank import LowRankUpdate, write_factors
from ktcli.ops.torch.packed import Matrix
from ktcli.planner.memory import AdapterRoom, ProductRoom
from ktcli.records import dataclass

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


class _Buffers:
    """The factors of the products on one device, in one piece of its memory."""

    def __init__(self, rooms: Sequence[ProductRoom], stream: Stream) -> None:
        self._rooms, self._stream = rooms, stream
        self._ends = list(accumulate((each.elements for each in rooms), initial=0))
        self._values = torch.zeros(self._ends[-1], device=stream.device)

    @property
    def size_bytes(self) -> int:
        """The bytes of the device's memory that they take."""
        return self._values.nbytes

    def updates(self) -> dict[str, LowRankUpdate]:
        """The update of each product, in the buffers."""
        return {
            room.name: LowRankUpdate(a, b) if room.heads else LowRankUpdate(a[0], b[0])
            for room, a, b in self._cut(self._values)
        }

    def packed(self, adapter: PackedAdapter) -> Tensor:
        """What the buffers have for an adapter, in pinned memory."""
        if not self._rooms:
            return torch.empty(0)
        values = self._stream.pinned(self.size_bytes).view(torch.float32)
        for room, a, b in self._cut(values):
            write_factors(adapter.updates.get(room.name, ()), a.numpy(), b.numpy())
        return values

    def fill(self, values: Tensor | None) -> None:
        """Copies what `packed` gave, or zeros."""
        if values is None:
            self._values.zero_()
        elif self._rooms:
            self._stream.copy(self._values, values)

    def _cut(self, values: Tensor) -> Iterator[tuple[ProductRoom, Tensor, Tensor]]:
        """Yields both factors of each product, of values in the layout of the buffers."""
        for room, (first, last) in zip(self._rooms, pairwise(self._ends), strict=True):
            middle = first + room.a_elements
            a = values[first:middle].view(room.a_count, room.ranks, room.k)
            yield room, a, values[middle:last].view(room.b_count, room.n, room.ranks)


@dataclass(frozen=True, slots=True)
class _Attached:
    """An adapter, and what each device's buffers have for it."""

    adapter: PackedAdapter
    values: Sequence[Tensor]


class DeviceUpdates:
    """The updates and gains of adapters beside the products of an engine with a device.

    Args:
        weights: those on the devices, without updates.
        segments: the layers of each device.
    Attributes:
        weights: the weights with what is added to products with them.
    """

    def __init__(
        self, model: Model, room: AdapterRoom, weights: Weights, segments: Sequence[Segment]
    ) -> None:
        self._ranks = dict.fromkeys(_products(model), 0)
        self._ranks |= {each.name: each.ranks for each in room.products}
        if room.experts_bytes:
            experts = (t.name for t in model.tensors if t.role is Role.EXPERTS)
            self._ranks |= {name: room.ranks for name in experts if name in self._ranks}
        self._segments = segments
        self._streams = [each.stream for each in segments]
        with running(self._streams):
            self._buffers = [_Buffers(_of(room, each, segments), each.stream) for each in segments]
        self.weights = replace(weights, matrices=self._beside(weights))
        gains = filter(None, (replaceable(each) for each in _operations(model)))
        self._gains = {gain.name: weights.vectors[gain.name] for gain in gains}
        self._own: dict[str, Tensor] = {}  # gains that some adapter replaces
        self._there: dict[int, _Attached] = {}
        self._in_use: int | None = 0  # None: buffers and gains may have anything
        self._host: HostExperts | None = None

    @property
    def products(self) -> Mapping[str, int]:
        """A mapping from the name of each weight tensor whose products can be updated to the most ranks that its
        updates may have; 0: it cannot be updated.
        """
        return self._ranks

    @property
    def norms(self) -> Mapping[str, Tensor]:
        """A mapping from the names of the norms' gains that an adapter can replace to the tensors on the devices that
        steps read.
        """
        return self._gains

    @property
    def size_bytes(self) -> int:
        """The bytes of device memory that the buffers for adapters' factors take."""
        return sum(each.size_bytes for each in self._buffers)

    def ranks(self, name: str) -> int:
        """Returns the most ranks, summed over one adapter's low-rank updates, for which the product with the tensor
        `name` has room; 0: there is none.
        """
        return self._ranks[name]

    def set(self, number: int, adapter: PackedAdapter) -> None:
        """Loads the low-rank updates and gains of `adapter` as number `number`, which runs can name from the next step
        on; not to be called during a step.
        """
        with running(self._streams):
            for name in adapter.gains:
                self._own.setdefault(name, self._gains[name].clone())
        values = [each.packed(adapter) for each in self._buffers]
        self._there[number] = _Attached(adapter, values)
        self._forget_use(number)
        if self._on_host is not None:
            self._on_host.set(number, adapter)

    def forget(self, number: int, adapter: PackedAdapter) -> None:
        """Removes the updates and gains that `set` loaded as number `number`; not to be called during a step."""
        self._there.pop(number, None)
        self._forget_use(number)
        if self._on_host is not None:
            self._on_host.forget(number, adapter)

    def accompany(self, host: HostExperts | None) -> None:
        """Makes steps use `host` as the experts in main memory from now on, and loads the updates of all attached
        adapters into it; None: no experts are in main memory.
        """
        self._host, self._in_use = host, None
        if self._on_host is not None:
            for number, each in self._there.items():
                self._on_host.set(number, each.adapter)

    def use(self, number: int) -> None:
        """Makes the following steps compute all rows with the updates and gains of adapter `number`; 0: without an
        adapter.
        """
        if number == self._in_use:
            return
        self._in_use = None
        attached = self._there.get(number)
        with running(self._streams):
            for i, buffers in enumerate(self._buffers):
                buffers.fill(None if attached is None else attached.values[i])
            gains = {} if attached is None else attached.adapter.gains
            for name, own in self._own.items():
                self._gains[name].copy_(torch.from_numpy(gains[name]) if name in gains else own)
        if self._host is not None and self._host.updates is not None:
            self._host.use_adapter(number)
        self._in_use = number

    @property
    def _on_host(self) -> ProgramUpdates | None:
        """The updates of experts in main memory; None: there is no room for any."""
        return None if self._host is None else self._host.updates

    def _forget_use(self, number: int) -> None:
        """Lets the next step copy values anew, if this adapter's are in the buffers."""
        if self._in_use == number:
            self._in_use = None

    def _beside(self, weights: Weights) -> Mapping[str, Matrix]:
        updates: dict[str, LowRankUpdate] = {}
        for each in self._buffers:
            updates |= each.updates()
        return {
            name: replace(matrix, update=updates.get(name))
            for name, matrix in weights.matrices.items()
        }


def run_by_adapter(
    batch: Batch, run: Callable[[Batch], list[Logits]], use: Callable[[int], None]
) -> list[Logits]:
    """Computes a batch adapter by adapter, the runs of each as a batch of their own; returns the logits of all rows
    that give some, in the order of the whole batch.

    Args:
        run: computes a batch; its logits may be valid only until it is called again.
        use: called with the number of the adapter that the next batch has.
    """
    numbers = sorted({each.adapter for each in batch.runs})
    found: dict[int, list[Logits]] = {}
    for number in numbers:
        own = [i for i, each in enumerate(batch.runs) if each.adapter == number]
        use(number)
        made = iter(run(Batch(tuple(batch.runs[i] for i in own))))
        for i in own:
            some = islice(made, batch.runs[i].ids.size - batch.runs[i].first_output)
            found[i] = [each if number == numbers[-1] else each.copied() for each in some]
    return [logits for i in range(len(batch.runs)) for logits in found[i]]


def _operations(model: Model) -> list[Operation]:
    return [each.operation for each in record(model.forward).records]


def _products(model: Model) -> list[str]:
    """The names of the tensors whose products an adapter may change."""
    return [tensor.name for each in _operations(model) for tensor in multiplied(each)]


def _of(
    room: AdapterRoom, segment: Segment, segments: Sequence[Segment]
) -> tuple[ProductRoom, ...]:
    """The products of a segment; those of no layer are behind the last one."""
    last = segment is segments[-1]
    return tuple(
        p for p in room.products if (last if p.layer is None else p.layer in segment.layers)
    )
