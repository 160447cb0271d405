"""The dense matrices of a model on a device: those of the first layers stay there, the others lie in main memory and
are copied when their layer's turn comes.

The matrices of a layer lie side by side, so that a layer is one copy. Two buffers take turns: while a layer is
computed, the next one in the same direction, forward or backward, is copied. What belongs to no layer, which is the
output head, counts as one behind the last and always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from ktcli.engine.arenas import aligned
from ktcli.engine.device.stream import Mark, Stream, device_errors, one_step, stream_on
from ktcli.engine.loader import Progress, TensorSource, load_tensors
from ktcli.errors import DeviceError
from ktcli.models import Model
from ktcli.native import Arena, Format, Pool, packed_bytes
from ktcli.ops import tensors
from ktcli.ops.native import Loaded
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.ops.torch.packed import Packed
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe, stored_bytes

BUFFERS = 2
_COMPUTES, _COPIES = 0, 1  # the streams of a device


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """What computes attention and dense parts.

    Attributes:
        resident: how many layers have their dense matrices there all the time, from the first one on.
    """

    device: torch.device
    resident: int


def is_read(tensor: tensors.Tensor) -> bool:
    """Returns whether training reads a stored tensor of a model: all but the keys of latent attention's absorbed
    form.
    """
    return tensor.part is not ModelPart.LATENT or not tensor.sources[0][0].transposed


def is_on_device(tensor: tensors.Tensor) -> bool:
    """Returns whether a stored tensor is, in training with a GPU, a matrix that the GPU multiplies with: a dense one
    that is read.
    """
    return tensor.role in (Role.DENSE, Role.KEPT) and is_read(tensor)


def is_on_host(tensor: tensors.Tensor) -> bool:
    """Returns whether a stored tensor is in main memory in training with a GPU: the embedding, vectors and experts
    are.
    """
    return tensor.role not in (Role.DENSE, Role.KEPT)


def dense_bytes(model: Model, recipe: Recipe) -> list[int]:
    """Returns the bytes of the dense matrices of each layer, and last those of the output head: layers + 1 numbers."""
    found = [0] * (model.spec.layers + 1)
    for tensor in filter(is_on_device, model.tensors):
        found[_layer_of(tensor, model)] += aligned(stored_bytes(tensor, recipe))
    return found


def _layer_of(tensor: tensors.Tensor, model: Model) -> int:
    return model.spec.layers if tensor.layer is None else tensor.layer


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the bytes of its layer."""

    layer: int
    first: int
    format: Format
    shape: tuple[int, int, int]  # count, n, k


class DenseLayers:
    """The dense matrices of a model; `load` makes them.

    Args:
        layers: the bytes of each layer, and last those of the output head; on the device or, of those that `stays`
            says False of, in main memory.
        places: of each tensor, by name.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        stays: Sequence[bool],
        places: Mapping[str, _Place],
        device: torch.device,
    ) -> None:
        self.device = device
        self._layers, self._stays, self._places = layers, stays, places
        self._compute, self._copies = (stream_on(device, each) for each in (_COMPUTES, _COPIES))
        moved = (each.nbytes for each, stay in zip(layers, stays, strict=True) if not stay)
        size = max(moved, default=0)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self._held: list[int | None] = [None] * BUFFERS
        self._ready: dict[int, Mark] = {}
        self._now: int | None = None

    @classmethod
    @device_errors("loading")
    def load(
        cls,
        model: Model,
        recipe: Recipe,
        source: TensorSource,
        where: TrainingDevice,
        progress: Callable[[int], object] = lambda done: None,
    ) -> Self:
        """Returns the dense matrices of a model, loaded: those of the first layers and the output head on the device,
        the others in main memory; raises as `TrainableModel.load`.

        Args:
            progress: called with the bytes of each layer that was loaded.
        """
        last = model.spec.layers
        pool = Pool(1, spin_us=0)  # one node, whose memory no other shares
        copies = stream_on(where.device, _COPIES)
        layers, stays, places = [], [], dict[str, _Place]()
        for layer in range(last + 1):
            found = [t for t in model.tensors if is_on_device(t) and _layer_of(t, model) == layer]
            loaded = load_tensors(found, recipe, source, pool)
            data = torch.empty(0, dtype=torch.uint8)
            for tensor in found:
                data, places[tensor.name] = _placed(loaded.by_name[tensor.name], layer)
            stays.append(layer < where.resident or layer == last)
            layers.append(data.to(where.device, copy=True) if stays[-1] else _pinned(data, copies))
            progress(data.nbytes)
        return cls(layers, stays, places, where.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Opens a context, without a value, for one step's work on the device: it begins after all work given to the
        device before, and its end waits until the device has finished.

        Raises:
            DeviceError: the device failed, or its memory is full.
        """
        streams = self._compute, self._copies
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # an optimizer's work is in no stream of ours
        with one_step(streams), self._compute.running():
            yield
            for each in streams:
                each.synchronize()

    def matrix(self, name: str) -> Packed:
        """Returns a dense matrix on the device by its tensor's name, still packed. The call makes the matrix's layer
        the current one and starts copying its neighbour on the way: the next, or in a backward pass the one before.
        """
        place = self._places[name]
        count, n, k = place.shape
        size = count * packed_bytes(place.format, n, k)
        data = self._bytes(place.layer)[place.first : place.first + size]
        return Packed(place.format, n, k, data.view(count, -1))

    def _bytes(self, layer: int) -> Tensor:
        """Returns the bytes of a layer on the device."""
        if layer != self._now:
            ahead = layer + (1 if self._now is None or layer > self._now else -1)
            self._now = layer
            read = self._compute.mark()  # all that reads a buffer was given to the stream before
            self._bring(layer, read)
            if 0 <= ahead < len(self._layers):
                self._bring(ahead, read)
        if layer in self._ready:
            self._compute.after(self._ready.pop(layer))
        if self._stays[layer]:
            return self._layers[layer]
        return self._buffers[self._held.index(layer)]

    def _bring(self, layer: int, read: Mark) -> None:
        """Copies a layer into a buffer that does not hold the present one, unless it is there."""
        if self._stays[layer] or layer in self._held:
            return
        number = next(i for i, held in enumerate(self._held) if held is None or held != self._now)
        if (held := self._held[number]) is not None:
            self._ready.pop(held, None)
        self._held[number] = layer
        data = self._layers[layer]
        self._copies.after(read)
        self._copies.copy(self._buffers[number][: data.nbytes], data)
        self._ready[layer] = self._copies.mark()


@dataclass(frozen=True, slots=True)
class ApartModel:
    """A model of which a device has the dense matrices.

    Attributes:
        dense: these. host: all other tensors that training reads, by name.
    """

    dense: DenseLayers
    host: Mapping[str, Loaded]


def load_apart(
    model: Model,
    recipe: Recipe,
    source: TensorSource,
    pool: Pool,
    where: TrainingDevice,
    progress: Progress | None = None,
) -> ApartModel:
    """Returns a model's tensors, loaded: its dense matrices for a training device, all others in main memory; raises as
    `TrainableModel.load`.
    """
    others = [tensor for tensor in model.tensors if is_on_host(tensor)]
    of_host = sum(stored_bytes(tensor, recipe) for tensor in others)
    total = of_host + sum(dense_bytes(model, recipe))
    done = 0

    def count(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(done, total)

    dense = DenseLayers.load(model, recipe, source, where, count)
    before = done
    host = load_tensors(
        others,
        recipe,
        source,
        pool,
        None if progress is None else lambda some, _: progress(before + some, total),
    )
    return ApartModel(dense, host.by_name)


def _placed(loaded: Loaded, layer: int) -> tuple[Tensor, _Place]:
    """Returns the bytes of the whole layer that a loaded tensor lies in, and its place there."""
    assert isinstance(loaded, tuple)
    (weight,) = loaded
    owner = weight.owner
    assert isinstance(owner, Arena)
    shape = weight.count, weight.n, weight.k
    place = _Place(layer, weight.address - owner.address, weight.format, shape)
    return torch.from_numpy(owner.bytes[: owner.size_bytes]), place


def _pinned(data: Tensor, copies: Stream) -> Tensor:
    """Returns the same bytes in pinned memory; where the system does not allow that, as they are."""
    try:
        found = copies.pinned(data.nbytes)
    except DeviceError:
        return data
    found.copy_(data)
    return found
