"""Fills memory with a model's tensors: from a pack, or with random weights.

Each node of the pool has an arena for its slices of the weights that nodes share; all else lies in one
arena over all nodes. A `TensorSource` provides the bytes; the tensor's role and cut decide their form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ktcli.engine.arenas import GetArena, NodeMemory, aligned
from ktcli.errors import BadCheckpoint, BadPack
from ktcli.models import Model
from ktcli.native import Axis, Format, Pool, Weight
from ktcli.ops.native import Loaded
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.planner.memory import drops_cached
from ktcli.planner.plan import Plan
from ktcli.planner.slices import ALL_TEAMS, ExpertTeams, Slice, shares_of, slices_of
from ktcli.records import dataclass
from ktcli.weights.ids import first_outside
from ktcli.weights.pack import Location, Pack
from ktcli.weights.recipe import BF16_BYTES, Recipe, format_of, stored_bytes

_HINT = "kt verify checks a model's files"

# progress(bytes done, bytes in all)
Progress = Callable[[int, int], None]

# The slice of a weight that each node has, and where it is to lie.
Shares = Sequence[tuple[Slice, Weight]]


class TensorSource(Protocol):
    """The interface of a source that supplies the bytes of tensors."""

    @property
    def identity(self) -> str:
        """A text that identifies the weights, such as a hash: equal for two sources only if their bytes are."""

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        """Fills `memory` with the tensor's bytes from byte `offset` on: whole panels of a packed tensor, or all of any
        other one. `target` is the same memory in the tensor's form.
        """

    def place(self, tensor: Tensor, whole: Weight, shares: Shares, offset: int = 0) -> None:
        """Writes each NUMA node's share of consecutive matrices of a tensor to the address of the share; the matrices
        begin at byte `offset` of the tensor, and `whole` has their number and shape.
        """


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a loaded model by name, and their memory.

    Attributes:
        size_bytes: the bytes that were filled.
        unbound: the reason why the system did not bind the memory to its nodes; "" if it did.
    """

    by_name: dict[str, Loaded]
    size_bytes: int
    unbound: str = ""


# The mask of experts that are elsewhere: bool [MoE layers, E].
Mask = NDArray[np.bool_]


def expert_rows(model: Model) -> dict[int, int]:
    """Returns a mapping from the number of each decoder layer with experts to its index among these layers, which is
    its row in a mask of experts.
    """
    layers = {t.layer for t in model.tensors if t.role is Role.EXPERTS and t.layer is not None}
    return {layer: row for row, layer in enumerate(sorted(layers))}


def load(
    model: Model,
    recipe: Recipe,
    source: TensorSource,
    pool: Pool,
    progress: Progress | None = None,
    *,
    skip: Mask | None = None,
    only: Callable[[Tensor], bool] = lambda tensor: True,
    experts_on: ExpertTeams = ALL_TEAMS,
) -> Tensors:
    """Reserves memory for a model's tensors, fills it from a source, and returns the tensors by name.

    Args:
        progress: called with the bytes loaded so far and the bytes in all.
        only: tells whether a tensor is loaded.
        skip: the experts that are neither read nor touched. Their place is kept, so that an expert's number tells where
            it lies; it takes no memory but for pages shared with others.
        experts_on: the numbers of the teams that share a layer's experts, by the layer's number; layers without an
            entry: all teams.
    """
    tensors = [each for each in model.tensors if only(each)]
    kept = _kept(model, skip)
    return load_tensors(tensors, recipe, source, pool, progress, kept=kept, experts_on=experts_on)


def load_tensors(
    tensors: Sequence[Tensor],
    recipe: Recipe,
    source: TensorSource,
    pool: Pool,
    progress: Progress | None = None,
    *,
    kept: Mapping[str, tuple[range, ...]] | None = None,
    experts_on: ExpertTeams = ALL_TEAMS,
    arena: GetArena | None = None,
) -> Tensors:
    """Reserves memory for some tensors of a model, fills it from a source, and returns the tensors by name.

    Args:
        kept: the ranges of a tensor's matrices that are filled, by the tensor's name; None: all.
        experts_on: as for `load`.
        arena: returns memory of at least so many bytes on a NUMA node; None: `Pool.arena`.
    """
    threads = pool.node_threads
    places = [
        _WeightPlace.of(
            tensor,
            recipe,
            shares_of(tensor, threads, experts_on),
            (range(tensor.count),) if kept is None else kept[tensor.name],
        )
        for tensor in tensors
    ]
    nodes = range(len(threads))
    node_bytes = [sum(aligned(p.slices[i].size_bytes) for p in places if p.slices) for i in nodes]
    shared_bytes = sum(aligned(place.size_bytes) for place in places if not place.slices)
    memory = NodeMemory(pool, node_bytes, shared_bytes, arena)
    by_name: dict[str, Loaded] = {}
    done, total = 0, sum(place.filled_bytes for place in places)
    for place in places:
        by_name[place.tensor.name] = place.fill(source, memory)
        done += place.filled_bytes
        if progress:
            progress(done, total)
    empty = sum(place.empty_bytes for place in places)
    unbound = memory.refused if len(nodes) > 1 else ""
    return Tensors(by_name, memory.size_bytes - empty, unbound)


def _kept(model: Model, skip: Mask | None) -> dict[str, tuple[range, ...]]:
    """The runs of consecutive matrices of each tensor that are loaded."""
    rows = expert_rows(model) if skip is not None else {}
    kept: dict[str, tuple[range, ...]] = {}
    for tensor in model.tensors:
        kept[tensor.name] = (range(tensor.count),)
        if skip is not None and tensor.role is Role.EXPERTS and tensor.layer is not None:
            kept[tensor.name] = runs_of(np.flatnonzero(~skip[rows[tensor.layer]]))
    return kept


def runs_of(ids: ArrayLike) -> tuple[range, ...]:
    """Returns the runs of consecutive ids among ascending ids, each as a range."""
    there = np.asarray(ids, np.int64)
    parts = np.split(there, np.flatnonzero(np.diff(there) != 1) + 1)
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in parts if part.size)


@dataclass(frozen=True, slots=True)
class _WeightPlace:
    """The place of a tensor: `slices` on their nodes, or all of it in the common memory.

    Attributes:
        size_bytes: the bytes of the whole tensor.
        kept: the runs of matrices that are filled.
    """

    tensor: Tensor
    format: Format | None
    size_bytes: int
    slices: tuple[Slice, ...]
    kept: tuple[range, ...]

    @classmethod
    def of(
        cls, tensor: Tensor, recipe: Recipe, shares: Sequence[int], kept: tuple[range, ...]
    ) -> _WeightPlace:
        fmt = format_of(tensor, recipe)
        slices = slices_of(tensor, recipe, shares)
        return cls(tensor, fmt, stored_bytes(tensor, recipe), slices, kept)

    @property
    def _filled(self) -> int:
        """The number of matrices that are filled."""
        return sum(map(len, self.kept))

    @property
    def filled_bytes(self) -> int:
        return self.size_bytes // self.tensor.count * self._filled

    @property
    def empty_bytes(self) -> int:
        """The bytes that are reserved for matrices that are not filled."""
        reserved = sum(cut.size_bytes for cut in self.slices) or self.size_bytes
        return reserved // self.tensor.count * (self.tensor.count - self._filled)

    def fill(self, source: TensorSource, memory: NodeMemory) -> Loaded:
        tensor = self.tensor
        if self.format is None:
            piece = memory.take(self.size_bytes)
            rows = as_array(tensor, piece.bytes)
            source.fill(tensor, rows, piece.bytes)
            require_ids(tensor, rows)
            return rows
        each = self.size_bytes // tensor.count
        whole = Weight(self.format, tensor.n, tensor.k, tensor.count, 0, None)
        if not self.slices:
            piece = memory.take(self.size_bytes)
            weight = replace(whole, address=piece.address, owner=piece.owner)
            for run in self.kept:
                part = piece.bytes[run.start * each : run.stop * each]
                source.fill(tensor, (_matrices(weight, run),), part, run.start * each)
            return (weight,)
        pieces = [memory.take(cut.size_bytes, node) for node, cut in enumerate(self.slices)]
        targets = tuple(
            replace(whole, n=cut.n, k=cut.k, address=piece.address, owner=piece.owner)
            for cut, piece in zip(self.slices, pieces, strict=True)
        )
        for run in self.kept:
            parts = [_matrices(target, run) for target in targets]
            shares = list(zip(self.slices, parts, strict=True))
            source.place(tensor, replace(whole, count=len(run)), shares, run.start * each)
        return targets


def _matrices(weight: Weight, run: range) -> Weight:
    """A run of a weight's matrices, as a weight."""
    start = run.start * (weight.size_bytes // weight.count)
    return replace(weight, count=len(run), address=weight.address + start)


def as_array(tensor: Tensor, memory: NDArray[np.uint8]) -> NDArray[Any]:
    """Returns a view of `memory`, which holds the bytes of a tensor that is not packed, as an array: a table as [n, k],
    f32 or uint16 (the bits of bf16), any other tensor as an f32 vector.
    """
    if tensor.role is Role.TABLE:
        dtype = np.uint16 if memory.nbytes == BF16_BYTES * tensor.elements else np.float32
        return memory.view(dtype).reshape(tensor.n, tensor.k)
    return memory.view(np.float32)


def require_ids(tensor: Tensor, values: NDArray[Any]) -> None:
    """Raises BadPack if a tensor of expert ids holds a number that is not the id of an expert; does nothing for other
    tensors.

    Raises:
        BadPack: a number of a tensor of ids is not an id.
    """
    if tensor.below and (at := first_outside(values, tensor.below)) is not None:
        said = f"value {at} of {tensor.name} is {values[at]}, which is not one of {tensor.below} experts"
        raise BadPack(said, hint=_HINT)


class PackSource:
    """The tensors of a converted model, read by all threads through the page cache.

    Args:
        drop: whether to give up the cached pages of the files: there is no room for them beside the weights.
    """

    def __init__(self, pack: Pack, pool: Pool, *, drop: bool = False) -> None:
        self._pack, self._pool, self._drop = pack, pool, drop

    @property
    def identity(self) -> str:
        """The SHA-256, hexadecimal, of the converted model's family, config and weight files."""
        return self._pack.identity

    @classmethod
    def planned(cls, pack: Pack, pool: Pool, plan: Plan) -> PackSource:
        """Returns a source that reads the tensors of a converted model; after reading, it drops the files from the page
        cache if the plan leaves no room for them there.
        """
        drop = drops_cached(pack.size_bytes, plan.need_bytes, plan.host.available_bytes)
        return cls(pack, pool, drop=drop)

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        """Fills `memory` with the tensor's bytes from byte `offset` on, read from its file."""
        place = self._part(tensor, offset, memory.nbytes)
        with self._reading(place) as descriptor:
            self._pool.read_file(descriptor, place.offset, memory)

    def place(self, tensor: Tensor, whole: Weight, shares: Shares, offset: int = 0) -> None:
        """Reads consecutive matrices of a tensor, from byte `offset` of the tensor on, and writes each NUMA node's
        share of them to the address of the share; `whole` has their number and shape.
        """
        place = self._part(tensor, offset, whole.size_bytes)
        axis = Axis.ROWS if tensor.cut is Cut.ROWS else Axis.COLUMNS
        ranges = [(each.of, target) for each, target in shares]
        with self._reading(place) as descriptor:
            self._pool.place(descriptor, place.offset, whole, axis, ranges)

    def _part(self, tensor: Tensor, offset: int, size_bytes: int) -> Location:
        """The location of some bytes of a tensor; `locate` has checked its format and shape."""
        place = self._pack.locate(tensor)
        assert 0 <= offset <= place.size_bytes - size_bytes, tensor.name
        return Location(place.path, place.offset + offset, size_bytes)

    @contextmanager
    def _reading(self, place: Location) -> Iterator[int]:
        """Opens the file of a tensor; its cached pages are given up afterwards if they must."""
        try:
            descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            said = f"{place.path.name} cannot be opened: {error.strerror}"
            raise BadPack(said, hint=_HINT) from error
        try:
            yield descriptor
            if self._drop:
                advice = os.POSIX_FADV_DONTNEED
                os.posix_fadvise(descriptor, place.offset, place.size_bytes, advice)
        except BadCheckpoint as error:
            raise BadPack(f"{place.path.name} cannot be read: {error}", hint=_HINT) from None
        finally:
            os.close(descriptor)


class RandomSource:
    """Random weights of the true shapes, for measuring a machine without a checkpoint.

    Vectors are neutral (gains 1, biases 0); ids of experts cycle; matrices have rms 1/sqrt(k), so that
    activations keep their size and the router's choices spread evenly. The slices of nodes are random by themselves.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool, self._seed = pool, seed
        self.identity = f"{type(self).__name__} {seed}"

    def fill(
        self, tensor: Tensor, target: Loaded, memory: NDArray[np.uint8], offset: int = 0
    ) -> None:
        """Fills the memory of a tensor: matrices and tables with random numbers, tables of expert ids with the ids in
        turn, other vectors with neutral values (gains 1, biases 0).
        """
        self._seed += 1
        if isinstance(target, tuple):
            self._pool.fill_random(target[0], self._seed)
        elif tensor.role is Role.TABLE:
            generator = np.random.default_rng(self._seed)
            for row in target:  # row by row: the embedding of a large model is gigabytes
                drawn = generator.standard_normal(row.size, dtype=np.float32)
                row[:] = drawn if row.dtype == np.float32 else drawn.view(np.uint32) >> 16
        elif tensor.below:  # as many of each, and those of one token differ
            target[:] = np.arange(target.size) % tensor.below
        else:
            target[:] = tensor.neutral

    def place(self, tensor: Tensor, whole: Weight, shares: Shares, offset: int = 0) -> None:
        """Fills each NUMA node's share of a tensor with random weights."""
        for _, target in shares:
            self._seed += 1
            if target.size_bytes:
                self._pool.fill_random(target, self._seed)
