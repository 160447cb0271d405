"""A model's tensors in device memory: everything except the embedding, the experts that a mask excludes, and the parts
of layers that are in main memory.

All of it lies in one allocation, whose size is known before a byte is read; the bytes come from the same
sources as the CPU's, in pieces of whole panels through pinned memory, and each piece that is needed is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ktcli.engine.device.stream import pinned_memory
from ktcli.engine.loader import Mask, Progress, TensorSource, as_array, expert_rows, require_ids
from ktcli.models import Model
from ktcli.native import PANEL_ROWS, Format, Weight, packed_bytes
from ktcli.ops.part import LayerPart, ModelPart
from ktcli.ops.tensors import Cut, Role, Tensor, ceil_to
from ktcli.ops.torch.backend import Weights
from ktcli.ops.torch.packed import (
    ROUTED_ROWS,
    Extras,
    Matrix,
    Packed,
    PackedStack,
    PlainMatrix,
    unpack,
)
from ktcli.planner.stack import plain_bytes
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe, format_of, is_in_f32, stored_bytes

_ALIGNMENT = 256  # bytes; a separate allocation would begin at a multiple of it
_DTYPES = {0: torch.uint8, 2: torch.bfloat16, 4: torch.float32}  # by bytes of a plain value
# Each of the two pinned buffers, unless one panel is larger. To un-pack one takes five times as much of a full card.
_STAGING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The part of a model that is loaded on a device.

    Attributes:
        embedding: bf16 or f32 [vocab, H] in host memory: a step needs a few of its rows.
        stacks: the experts of each MoE layer that are here.
        size_bytes: bytes on the device.
    """

    weights: Weights
    embedding: torch.Tensor
    stacks: tuple[PackedStack, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor, or some of its matrices, as it will lie on the device.

    Attributes:
        format: the format it is stored in; None: a vector.
        indices: the matrices that are taken, ascending.
        dtype: the type of the values if it is un-packed; uint8: it stays packed.
    """

    tensor: Tensor
    format: Format | None
    indices: tuple[int, ...]
    dtype: torch.dtype

    @property
    def matrix_bytes(self) -> int:
        """The bytes of one matrix as stored."""
        t = self.tensor
        return 4 * t.n * t.k if self.format is None else packed_bytes(self.format, t.n, t.k)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.dtype is torch.uint8:
            return len(self.indices), self.matrix_bytes
        if self.tensor.is_expert_bias:
            return self.tensor.count, self.tensor.k
        return (self.tensor.n, self.tensor.k) if self.format is not None else (self.tensor.k,)

    @property
    def size_bytes(self) -> int:
        """The bytes on the device."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def load_device(
    model: Model,
    recipe: Recipe,
    source: TensorSource,
    mask: Mask,
    devices: Sequence[torch.device],
    progress: Progress | None = None,
    apart: Collection[LayerPart] = (),
) -> DeviceModel:
    """Loads a model's weights, except for the experts and parts that stay in main memory: the embedding into main
    memory, all else into device memory; returns them.

    Args:
        mask: true for the experts on the device, bool [MoE layers, E].
        devices: the device of each layer; the last layer's also has the head.
        progress: called with the bytes loaded so far and the bytes in all.
        apart: the parts of layers that stay in main memory.
    Raises:
        torch.OutOfMemoryError: a device has too little memory.
        BadPack: the files are damaged.
    """
    parts = _parts(model, recipe, mask, apart)
    places = {part.tensor.name: _device_of(part.tensor, devices) for part in parts}
    needs = dict.fromkeys(devices, 0)
    for part in parts:
        needs[places[part.tensor.name]] += ceil_to(part.size_bytes, _ALIGNMENT)
    memory = {device: _Memory(size_bytes, device) for device, size_bytes in needs.items()}
    table = next(tensor for tensor in model.tensors if tensor.role is Role.TABLE)
    table_bytes = stored_bytes(table, recipe)
    total = table_bytes + sum(part.matrix_bytes * len(part.indices) for part in parts)
    filler = _Filler(source, total, progress)
    dtype = torch.float32 if is_in_f32(table, recipe) else torch.bfloat16
    embedding = torch.empty(table.n, table.k, dtype=dtype)
    filler.fill_host(table, embedding)
    data: dict[str, torch.Tensor] = {}
    for part in parts:
        data[part.tensor.name] = memory[places[part.tensor.name]].take(part)
        filler.fill(part, data[part.tensor.name])
    for device in memory:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    matrices, vectors = _by_kind(parts, data)
    stacks = _stacks(model, matrices, vectors, mask)
    size_bytes = sum(each.size_bytes for each in memory.values())
    return DeviceModel(Weights(matrices, vectors), embedding, stacks, size_bytes)


def _by_kind(
    parts: Sequence[_Part], data: dict[str, torch.Tensor]
) -> tuple[dict[str, Matrix], dict[str, torch.Tensor]]:
    """The matrices and the vectors in the data of tensors; ids in a table of experts are checked."""
    matrices, vectors = dict[str, Matrix](), dict[str, torch.Tensor]()
    for part in parts:
        name = part.tensor.name
        if part.format is not None:
            matrices[name] = _matrix(part, data[name], part.format)
            continue
        if part.tensor.below:
            require_ids(part.tensor, data[name].cpu().numpy())
        vectors[name] = data[name]
    return matrices, vectors


def _device_of(tensor: Tensor, devices: Sequence[torch.device]) -> torch.device:
    """The device of a tensor; what belongs to no layer comes behind the last one."""
    return devices[-1 if tensor.layer is None else tensor.layer]


def _parts(model: Model, recipe: Recipe, mask: Mask, apart: Collection[LayerPart]) -> list[_Part]:
    """The tensors of a device, in the order of the model."""
    rows = expert_rows(model)
    parts = []
    for tensor in model.tensors:
        fmt = format_of(tensor, recipe)
        indices = tuple(range(tensor.count))
        if tensor.role is Role.EXPERTS and tensor.layer is not None:
            indices = tuple(np.flatnonzero(mask[rows[tensor.layer]]).tolist())
        if tensor.role is not Role.TABLE and tensor.layer_part not in apart:
            parts.append(_Part(tensor, fmt, indices, _dtype(tensor, fmt)))
    return parts


def _dtype(tensor: Tensor, fmt: Format | None) -> torch.dtype:
    """The type of the values on the device; uint8: they stay packed."""
    if fmt is None:
        return torch.float32
    return _DTYPES[plain_bytes(tensor, fmt)]


def _matrix(part: _Part, data: torch.Tensor, fmt: Format) -> Matrix:
    if part.dtype is torch.uint8:
        return Packed(fmt, part.tensor.n, part.tensor.k, data)
    tickets = None
    if part.tensor.part is ModelPart.ROUTER:
        # A copy from pageable memory has ended when it returns: whichever stream runs the steps sees zeros.
        tickets = torch.zeros(ROUTED_ROWS, dtype=torch.int32).to(data.device)
    return PlainMatrix(data, tickets)


def _stacks(
    model: Model, matrices: dict[str, Matrix], vectors: dict[str, torch.Tensor], mask: Mask
) -> tuple[PackedStack, ...]:
    """Takes the experts out of matrices and vectors; returns one stack for each layer with experts."""
    stacks = []
    for layer, row in expert_rows(model).items():
        of_layer = [t for t in model.tensors if t.role is Role.EXPERTS and t.layer == layer]
        gate_up, down = (
            matrices.pop(tensor.name)
            for tensor in sorted(of_layer, key=lambda tensor: tensor.cut is Cut.COLUMNS)
        )
        assert isinstance(gate_up, Packed) and isinstance(down, Packed)
        here = mask[row]
        slots = np.where(here, np.cumsum(here) - 1, -1).astype(np.int32)
        biases = sorted(
            (t for t in model.tensors if t.is_expert_bias and t.layer == layer),
            key=lambda tensor: not tensor.alternate,
        )
        extras = Extras(model.spec.glus[row], *(vectors.pop(tensor.name) for tensor in biases))
        slots_there = torch.from_numpy(slots).to(gate_up.data.device)
        stacks.append(PackedStack(slots_there, gate_up, down, extras))
    return tuple(stacks)


class _Memory:
    """One allocation on the device, handed out piece by piece."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, part: _Part) -> torch.Tensor:
        """Takes the next piece, in the part's dtype and shape."""
        first, size = self._used, part.size_bytes
        self._used += ceil_to(size, _ALIGNMENT)
        return self._bytes[first : first + size].view(part.dtype).view(part.shape)


class _Filler:
    """Copies bytes from a source to the device, and reports how many there are so far."""

    def __init__(self, source: TensorSource, total: int, progress: Progress | None) -> None:
        self._source = source
        self._done, self._total, self._progress = 0, total, progress
        self._staging: dict[torch.device, _Staging] = {}

    def fill_host(self, tensor: Tensor, target: torch.Tensor) -> None:
        """Fills a tensor that is not packed, in host memory."""
        memory = target.view(torch.uint8).numpy().reshape(-1)
        self._source.fill(tensor, as_array(tensor, memory), memory)
        self._count(memory.nbytes)

    def fill(self, part: _Part, target: torch.Tensor) -> None:
        """Fills a part's target, matrix by matrix."""
        if part.format is None:
            self._vector(part.tensor, target)
            return
        for slot, index in enumerate(part.indices):
            for piece in _pieces(part, part.format):
                offset = index * part.matrix_bytes + piece.offset
                if part.dtype is torch.uint8:
                    to = target[slot, piece.offset : piece.offset + piece.size_bytes]
                    self._piece(part, piece, offset, to)
                    continue
                to = torch.empty(piece.size_bytes, dtype=torch.uint8, device=target.device)
                self._piece(part, piece, offset, to)
                rows = Packed(part.format, piece.rows, part.tensor.k, to[None])
                target[piece.first : piece.first + piece.rows] = unpack(rows, 0, part.dtype)

    def _vector(self, tensor: Tensor, target: torch.Tensor) -> None:
        def read(memory: NDArray[np.uint8]) -> None:
            self._source.fill(tensor, as_array(tensor, memory), memory)

        self._write(target.view(-1).view(torch.uint8), read)

    def _piece(self, part: _Part, piece: _DevicePiece, offset: int, target: torch.Tensor) -> None:
        """Fills some panels of a matrix, from byte `offset` of the tensor."""
        fmt, k = part.format, part.tensor.k
        assert fmt is not None

        def read(memory: NDArray[np.uint8]) -> None:
            weight = Weight(fmt, piece.rows, k, 1, memory.ctypes.data, memory)
            self._source.fill(part.tensor, (weight,), memory, offset)

        self._write(target, read)

    def _write(self, target: torch.Tensor, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Writes to `target`, uint8 [n], the bytes that `read` puts into the memory it is given."""
        if target.device.type != "cuda":
            read(target.numpy())
        else:
            with torch.cuda.device(target.device):
                staging = self._staging.setdefault(target.device, _Staging())
                staging.write(target, read)
        self._count(target.nbytes)

    def _count(self, size_bytes: int) -> None:
        self._done += size_bytes
        if self._progress:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _DevicePiece:
    """Consecutive panels of a matrix: rows [first, first + rows), bytes [offset, offset + size_bytes)."""

    first: int
    rows: int
    offset: int
    size_bytes: int


def _pieces(part: _Part, fmt: Format) -> Iterator[_DevicePiece]:
    panel_bytes = packed_bytes(fmt, PANEL_ROWS, part.tensor.k)
    step = PANEL_ROWS * max(1, _STAGING_BYTES // panel_bytes)
    for first in range(0, part.tensor.n, step):
        rows = min(step, part.tensor.n - first)
        panels = -(-rows // PANEL_ROWS)
        yield _DevicePiece(first, rows, first // PANEL_ROWS * panel_bytes, panels * panel_bytes)


class _Staging:
    """Two pinned buffers used in turn: while one is copied, the other is filled. Not yet run on a GPU."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0

    def write(self, target: torch.Tensor, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Reads into a buffer and starts its copy to `target`, uint8 [n], on the current stream."""
        which, self._next = self._next, 1 - self._next
        self._copied[which].synchronize()
        if self._buffers[which].nbytes < target.nbytes:
            size = max(_STAGING_BYTES, target.nbytes)
            self._buffers[which] = pinned_memory(target.device, size)
        part = self._buffers[which][: target.nbytes]
        read(part.numpy())
        target.copy_(part, non_blocking=True)
        self._copied[which].record()
