"""Filling memory with a model's tensors: from a pack, or with random weights.

Each node of the pool has an arena for its slices of the weights that nodes share; all else lies in one
arena over all nodes. Where the bytes come from is a `TensorSource`; what they become is decided by the
tensor's role and cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.arenas import NodeMemory, Piece, aligned
from ktcli.errors import BadCheckpoint, BadPack
from ktcli.layers.native_backend import Loaded
from ktcli.layers.tensors import Cut, Role, Tensor
from ktcli.models import Model
from ktcli.native import Axis, Format, Pool, Weight
from ktcli.planner.slices import Slice, slices_of
from ktcli.weights.pack import Location, Pack
from ktcli.weights.recipe import Recipe, format_of, stored_bytes

# progress(bytes done, bytes in all)
Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """Where the bytes of tensors come from."""

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        """Write the tensor's bytes into `memory`, which `target` shows as what it is."""

    def place(
        self, tensor: Tensor, whole: Weight, slices: Sequence[Slice], targets: Sequence[Weight]
    ) -> None:
        """Write each node's slice of a weight into its target; `whole` is its shape."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """A loaded model's tensors by name, and the memory they lie in.

    Attributes:
        unbound: why the system did not bind the memory to its nodes; "" if it did.
    """

    by_name: dict[str, Loaded]
    size_bytes: int
    unbound: str = ""


def memory_bytes(model: Model, recipe: Recipe) -> int:
    """Memory that a model's tensors take when nodes do not share them."""
    return sum(aligned(stored_bytes(tensor, recipe)) for tensor in model.tensors)


def load(
    model: Model,
    recipe: Recipe,
    source: TensorSource,
    pool: Pool,
    progress: Progress | None = None,
) -> Tensors:
    """Place and fill every tensor of the model."""
    places = [_Place.of(tensor, recipe, pool.node_threads) for tensor in model.tensors]
    nodes = range(len(pool.node_threads))
    node_bytes = [sum(aligned(p.slices[i].size_bytes) for p in places if p.slices) for i in nodes]
    shared_bytes = sum(aligned(place.size_bytes) for place in places if not place.slices)
    memory = NodeMemory(pool, node_bytes, shared_bytes)
    by_name: dict[str, Loaded] = {}
    done, total = 0, sum(place.size_bytes for place in places)
    for place in places:
        by_name[place.tensor.name] = place.fill(source, memory)
        done += place.size_bytes
        if progress:
            progress(done, total)
    return Tensors(by_name, memory.size_bytes, memory.refused if len(nodes) > 1 else "")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes: `slices` to their nodes, or all of it to the common memory."""

    tensor: Tensor
    format: Format | None
    size_bytes: int
    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, tensor: Tensor, recipe: Recipe, shares: Sequence[int]) -> _Place:
        fmt = format_of(tensor, recipe)
        slices = slices_of(tensor, fmt, shares) if fmt is not None else ()
        return cls(tensor, fmt, stored_bytes(tensor, recipe), slices)

    def fill(self, source: TensorSource, memory: NodeMemory) -> Loaded:
        if self.format is None or not self.slices:
            piece = memory.take(self.size_bytes)
            target = self._whole(piece)
            source.fill(self.tensor, target, piece.bytes)
            return target
        shape = Weight(self.format, self.tensor.n, self.tensor.k, self.tensor.count, 0, None)
        pieces = [memory.take(each.size_bytes, node) for node, each in enumerate(self.slices)]
        targets = tuple(
            Weight(self.format, each.n, each.k, self.tensor.count, piece.address, piece.owner)
            for each, piece in zip(self.slices, pieces, strict=True)
        )
        source.place(self.tensor, shape, self.slices, targets)
        return targets

    def _whole(self, piece: Piece) -> Loaded:
        """The memory as what a program takes: packed weight, bf16 rows or f32 vector."""
        tensor = self.tensor
        if self.format is not None:
            weight = (self.format, tensor.n, tensor.k, tensor.count, piece.address, piece.owner)
            return (Weight(*weight),)
        if tensor.role is Role.TABLE:
            return piece.bytes.view(np.uint16).reshape(tensor.n, tensor.k)
        return piece.bytes.view(np.float32)


class PackSource:
    """Tensors of a converted model, read by all threads through the page cache.

    Args:
        drop: give up the cached pages of what was read: there is no room for them beside the weights.
    """

    def __init__(self, pack: Pack, pool: Pool, *, drop: bool = False) -> None:
        self._pack, self._pool, self._drop = pack, pool, drop

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        place = self._pack.locate(tensor)
        if place.size_bytes != memory.nbytes:
            raise BadPack(
                f"{place.path.name}: {tensor.name} has {place.size_bytes} bytes, expected {memory.nbytes}",
                hint="convert the model again: kt convert",
            )
        with self._reading(place) as descriptor:
            self._pool.read_file(descriptor, place.offset, memory)

    def place(
        self, tensor: Tensor, whole: Weight, slices: Sequence[Slice], targets: Sequence[Weight]
    ) -> None:
        place = self._pack.locate(tensor)
        axis = Axis.ROWS if tensor.cut is Cut.ROWS else Axis.COLUMNS
        cuts = [each.of for each in slices]
        with self._reading(place) as descriptor:
            self._pool.place(descriptor, place.offset, whole, axis, cuts, targets)

    @contextmanager
    def _reading(self, place: Location) -> Iterator[int]:
        """The open file of a tensor; its cached pages go afterwards if they must."""
        try:
            descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadPack(
                f"{place.path.name} cannot be opened: {error.strerror}",
                hint="kt verify checks a model's files",
            ) from error
        try:
            yield descriptor
            if self._drop:
                advice = os.POSIX_FADV_DONTNEED
                os.posix_fadvise(descriptor, place.offset, place.size_bytes, advice)
        except BadCheckpoint as error:
            raise BadPack(
                f"{place.path.name} cannot be read: {error}",
                hint="kt verify checks a model's files",
            ) from None
        finally:
            os.close(descriptor)


class RandomSource:
    """Random weights of the true shapes, for measuring a machine without a checkpoint.

    Norm gains are 1 and biases 0; matrices have rms 1/sqrt(k), so that activations keep their size and
    the router's choices spread evenly. The slices of nodes are random by themselves.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool, self._seed = pool, seed

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        self._seed += 1
        if isinstance(target, tuple):
            self._pool.fill_random(target[0], self._seed)
        elif tensor.role is Role.TABLE:
            generator = np.random.default_rng(self._seed)
            for row in target:  # row by row: the embedding of a large model is gigabytes
                row[:] = generator.standard_normal(row.size, dtype=np.float32).view(np.uint32) >> 16
        else:
            target[:] = 0.0 if tensor.name.endswith("bias") else 1.0

    def place(
        self, tensor: Tensor, whole: Weight, slices: Sequence[Slice], targets: Sequence[Weight]
    ) -> None:
        for target in targets:
            self._seed += 1
            if target.size_bytes:
                self._pool.fill_random(target, self._seed)
