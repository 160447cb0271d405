"""The CPU backend turns a recording into a program of the native library.

The recording names tensors; `Places` says where they lie, and where each layer's part of pages and states begins.
Each record becomes one call, packed by field name (`Program.append`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.native import PAGE_TOKENS, Program, View, Weight
from ktcli.ops.kvformat import FORMATS
from ktcli.ops.operation import FieldKind, Operation, layout_of
from ktcli.ops.part import ModelPart, RowOf
from ktcli.ops.recording import Number, Record, Recording
from ktcli.ops.table.attention import Mla
from ktcli.ops.table.experts import Experts, Route
from ktcli.ops.table.rowwise import LayerNorm, Linear, Norm
from ktcli.ops.tensors import Role, Tensor
from ktcli.records import dataclass

# What the loader put into memory: packed weights, one slice per node of the pool, or a single weight where nodes
# do not share it; rows of the embedding, bf16 or f32; f32 vectors.
Loaded = tuple[Weight, ...] | NDArray[Any]

_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Places:
    """The memory of the tensors that a recording names, and each layer's offsets in pages and states.

    Attributes:
        tensors: what the loader made of each, by name.
        pages: where each layer's part of a KV page begins, bytes.
        states: where each layer's part of a sequence's state begins, f32 elements.
        windowed: the layers whose part is one of a window page.
        rows: the rows of kernels of some parts.
    """

    tensors: Mapping[str, Loaded]
    pages: Sequence[int] = ()
    states: Sequence[int] = ()
    windowed: frozenset[int] = frozenset()
    rows: RowOf = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Apart:
    """An operation that is a separate part of a program.

    Attributes:
        part: the number of that part.
        operation: the operation, with views of the program.
        routing: the number of the routing that it reads; None: it reads none.
    """

    part: int
    operation: Operation
    routing: int | None


@dataclass(frozen=True, slots=True)
class Assembled:
    """A program made of a recording, and the views of its results.

    Attributes:
        results: the views of the recording's results.
        routings: the numbers of the routers' results, in layer order.
        products: of each tensor that rows are multiplied with, the products that an adapter may change: the number of
            the operation, and the part of it.
        norms: of each gain the norms that have it, by their numbers.
        parts: the number of parts of the program.
        apart: the operations that are parts by themselves, as asked.
    """

    results: tuple[View, ...]
    routings: tuple[int, ...]
    products: Mapping[str, Sequence[tuple[int, int]]]
    norms: Mapping[str, Sequence[int]]
    parts: int = 1
    apart: tuple[Apart, ...] = ()


def assemble(
    recording: Recording,
    program: Program,
    places: Places,
    is_apart: Callable[[Operation], bool] = lambda operation: False,
) -> Assembled:
    """Appends every operation of a recording to a new native program and finishes the program. Returns the views of the
    recording's results, and the program's numbers for its routings (router results), products, norms and parts.

    Args:
        is_apart: returns whether an operation becomes a part by itself, so that its operands can be inspected.
    """
    for buffer in recording.buffers:
        program.buffer(buffer.width, outputs=buffer.outputs)
    numbers: dict[Number, int] = {}
    routings: list[int] = []
    products: dict[str, list[tuple[int, int]]] = {}
    norms: dict[str, list[int]] = {}
    apart: list[Apart] = []
    part = 0
    for each, row in zip(recording.records, record_rows(recording, places.rows), strict=True):
        program.use_row(row)
        for which, tensor in enumerate(multiplied(each.operation)):
            products.setdefault(tensor.name, []).append((len(program.labels), which))
        if (gain := replaceable(each.operation)) is not None:
            norms.setdefault(gain.name, []).append(len(program.labels))
        alone = is_apart(each.operation)
        if program.labels and (alone or (apart and apart[-1].part == part)):
            part = program.part()
        if alone:
            routed = layout_of(type(each.operation)).routing
            routing = numbers[getattr(each.operation, routed)] if routed else None
            apart.append(Apart(part, each.operation, routing))
        first = append(each, program, places, numbers)
        numbers |= {number: first + i for i, number in enumerate(each.numbers)}
        if isinstance(each.operation, Route):
            routings.append(first)
    program.finish()
    results, found = recording.results, tuple(routings)
    return Assembled(results, found, products, norms, part + 1, tuple(apart))


def append(
    record: Record, program: Program, places: Places, numbers: Mapping[Number, int] | None = None
) -> int:
    """Appends a recorded operation, whose views are the program's, to a native program. Returns the program's number
    for the first routing (experts) or choice (positions) that the operation makes; 0 if it makes none.

    Args:
        numbers: the program's number for each routing and choice recorded before; None: the operation reads none.
    """
    operation = record.operation
    told = _told(operation, places, numbers or {}, FORMATS[program.cache].element_bytes)
    return program.append(operation.name, (*record.outs, *record.operands), **dict(told))


def multiplied(operation: Operation) -> tuple[Tensor, ...]:
    """Returns the weight tensors of an operation whose products with rows an adapter may change, in the order in which
    the program numbers these products; empty: it has none.
    """
    if isinstance(operation, Linear):
        return (operation.weight,)
    if isinstance(operation, Mla):
        return operation.uk_in, operation.uk_out, operation.uv
    return (operation.gate_up, operation.down) if isinstance(operation, Experts) else ()


def replaceable(operation: Operation) -> Tensor | None:
    """Returns the gain tensor of an RMSNorm or LayerNorm, which adapters may replace; None: the
    operation has no gain.
    """
    return operation.gain if isinstance(operation, (Norm, LayerNorm)) else None


def _told(
    operation: Operation, places: Places, numbers: Mapping[Number, int], cached_bytes: int
) -> Iterator[tuple[str, Any]]:
    """Yields (field of the C struct, value) for everything but views."""
    layout = layout_of(type(operation))
    for name, fact in layout.told.items():
        yield name, fact(operation)
    for name, kind in layout.weights.items():
        tensor = getattr(operation, name)
        memory = None if tensor is None else _memory(tensor, kind, places)
        in_f32 = isinstance(memory, np.ndarray) and memory.dtype == np.float32
        yield f"{name}_f32" if kind is FieldKind.TABLE and in_f32 else name, memory
    if layout.routing:
        yield "routing", numbers[getattr(operation, layout.routing)]
    if layout.choice:
        choice = getattr(operation, layout.choice)
        yield "choice", numbers[choice] if choice else 0
    if layout.pages:
        before = operation.cached.before * PAGE_TOKENS * cached_bytes
        layer = getattr(operation, layout.pages)
        yield "layer_offset", places.pages[layer] + before
        if layer in places.windowed:
            yield "windowed", 1
    if layout.state:
        first = getattr(operation, layout.first)
        layer = getattr(operation, layout.state)
        yield "state_offset", _F32_BYTES * (places.states[layer] + first)


def _memory(tensor: Tensor, kind: FieldKind, places: Places) -> Loaded:
    found = places.tensors[tensor.name]
    if kind in (FieldKind.MATRIX, FieldKind.STACK):
        assert isinstance(found, tuple), tensor.name
        return found
    assert isinstance(found, np.ndarray) and found.size == tensor.elements, tensor.name
    return found.astype(np.int32) if kind is FieldKind.IDS else found


def record_rows(recording: Recording, rows: RowOf) -> list[str | None]:
    """Returns, for each operation of a recording, the name of the row of kernels (instruction set) that computes it:
    that of its layer and model part in `rows`; None: the one that the thread pool uses.

    An operation belongs to the part of the matrix that it reads, a norm with a gain to VECTORS, one that reads the KV
    cache but no matrix to CACHE. Others belong to the part of the operation before them in their layer.
    """
    found: list[str | None] = []
    part: ModelPart | None = None
    layer: int | None = None
    for record in recording.records:
        if record.layer != layer:
            part, layer = None, record.layer
        part = _own_part(record) or part
        found.append(None if part is None else rows.get((layer, part)))
    return found


def _own_part(record: Record) -> ModelPart | None:
    """The part that a record names itself."""
    operation = record.operation
    layout = layout_of(type(operation))
    tensors = [each for name in layout.weights if (each := getattr(operation, name)) is not None]
    matrix = next((each for each in tensors if each.role is not Role.VECTOR), None)
    if matrix is not None:
        return ModelPart(matrix.part)
    if isinstance(operation, Norm | LayerNorm):
        return ModelPart.VECTORS if tensors else None
    return ModelPart.CACHE if layout.pages else None
