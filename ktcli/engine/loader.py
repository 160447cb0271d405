"""Filling memory with a model's tensors: from a pack, or with random weights.

All tensors of a model share one arena (huge pages where the system gives them), each on a cache line.
Where the bytes come from is a `TensorSource`; what they become is decided by the tensor's role.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import BadCheckpoint, BadPack
from ktcli.layers.native_backend import Loaded
from ktcli.layers.tensors import Role, Tensor, ceil_to
from ktcli.models import Model
from ktcli.native import Arena, Pool, Weight
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe, format_of, stored_bytes

# progress(bytes done, bytes in all)
Progress = Callable[[int, int], None]
_LINE_BYTES = 64


class TensorSource(Protocol):
    """Where the bytes of tensors come from."""

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        """Write the tensor's bytes into `memory`, which `target` shows as what it is."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """A loaded model's tensors by name, and the memory they lie in."""

    by_name: dict[str, Loaded]
    size_bytes: int


def memory_bytes(model: Model, recipe: Recipe) -> int:
    """Memory that a model's tensors take when loaded."""
    return sum(ceil_to(stored_bytes(tensor, recipe), _LINE_BYTES) for tensor in model.tensors)


def load(
    model: Model, recipe: Recipe, source: TensorSource, progress: Progress | None = None
) -> Tensors:
    """Place and fill every tensor of the model."""
    total = memory_bytes(model, recipe)
    arena = Arena(total)
    by_name: dict[str, Loaded] = {}
    offset = 0
    for tensor in model.tensors:
        size = stored_bytes(tensor, recipe)
        memory = arena.bytes[offset : offset + size]
        target = _shown_as(tensor, recipe, memory, arena, offset)
        source.fill(tensor, target, memory)
        by_name[tensor.name] = target
        offset += ceil_to(size, _LINE_BYTES)
        if progress:
            progress(offset, total)
    return Tensors(by_name, total)


def _shown_as(
    tensor: Tensor, recipe: Recipe, memory: NDArray[np.uint8], arena: Arena, offset: int
) -> Loaded:
    """The memory as what a program takes: packed weight, bf16 rows or f32 vector."""
    fmt = format_of(tensor, recipe)
    if fmt is not None:
        return Weight(fmt, tensor.n, tensor.k, tensor.count, arena.address + offset, arena)
    if tensor.role is Role.TABLE:
        return memory.view(np.uint16).reshape(tensor.n, tensor.k)
    return memory.view(np.float32)


class PackSource:
    """Tensors of a converted model, read by all threads through the page cache."""

    def __init__(self, pack: Pack, pool: Pool) -> None:
        self._pack, self._pool = pack, pool

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        place = self._pack.locate(tensor)
        if place.size_bytes != memory.nbytes:
            raise BadPack(
                f"{place.path.name}: {tensor.name} has {place.size_bytes} bytes, expected {memory.nbytes}",
                hint="convert the model again: kt convert",
            )
        descriptor = _open(place.path)
        try:
            self._pool.read_file(descriptor, place.offset, memory)
        except BadCheckpoint as error:
            raise BadPack(
                f"{place.path.name} cannot be read: {error}",
                hint="kt verify checks a model's files",
            ) from None
        finally:
            os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadPack(
            f"{path.name} cannot be opened: {error.strerror}",
            hint="kt verify checks a model's files",
        ) from error


class RandomSource:
    """Random weights of the true shapes, for measuring a machine without a checkpoint.

    Norm gains are 1 and biases 0; matrices have rms 1/sqrt(k), so that activations keep their size and
    the router's choices spread evenly.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool, self._seed = pool, seed

    def fill(self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8]) -> None:
        self._seed += 1
        if isinstance(target, Weight):
            self._pool.fill_random(target, self._seed)
        elif tensor.role is Role.TABLE:
            generator = np.random.default_rng(self._seed)
            for row in target:  # row by row: the embedding of a large model is gigabytes
                row[:] = generator.standard_normal(row.size, dtype=np.float32).view(np.uint32) >> 16
        else:
            target[:] = 0.0 if tensor.name.endswith("bias") else 1.0
