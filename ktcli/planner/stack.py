"""Describes a model as layers of loads: what each decoder layer stores and computes per token, part by part.

`spec` counts a whole step; a plan with a GPU needs each layer by itself, because CPU and GPU work at the
same time and wait for each other layer by layer. Both count the same tensors by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ktcli.models.model import Model, Spec
from ktcli.native import Format
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.ops.part import LayerPart, ModelPart
from ktcli.ops.state import LayerState
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.experts import Mask, Room
from ktcli.planner.memory import AdapterRoom, ProductRoom
from ktcli.planner.spec import PartWork, Share, StepShape, Unit, cache_work, tensor_work
from ktcli.records import dataclass
from ktcli.weights.recipe import BF16_BYTES, F32_BYTES, Recipe, format_of, stored_bytes

F64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes stored in each layer, [L], the operations per token, [L] (a multiply and an add are two), and the
    products beside which an adapter has updates, [L]."""

    size_bytes: F64Array
    ops: F64Array
    updated: F64Array


@dataclass(frozen=True, slots=True)
class ModelLoads:
    """The layers of one model in one recipe.

    Attributes:
        before: the load of attention projections, norms and router.
        beside: the load of shared experts or the dense MLP on the GPU.
        expert: the load of one routed expert; zero in dense layers.
        apart: the load of shared experts or the dense MLP where they are in main memory, for the CPU.
        moe: the numbers of the layers with routed experts.
        head: the bytes and operations of the output head for one row.
        near_bytes: the bytes of each layer that lie on a GPU whatever the mask, and last those of the head, [L + 1].
        expert_unit, apart_unit: the loops that experts, and the other parts in main memory, run in on the CPU.
        states: the state that each layer keeps of a sequence.
        hidden, outputs, experts, top_k: the sizes of the model; outputs: the width of the rows that a step gives.
        deferrable: see `Spec.deferrable`.
        router_rows: the rows of a router's weight; more than experts where it has the gate of the shared one, too.
        cache: the number format of the cache.
    """

    before: Load
    beside: Load
    expert: Load
    apart: Load
    moe: NDArray[np.int64]
    head: PartWork
    near_bytes: F64Array
    expert_unit: Unit
    apart_unit: Unit
    states: tuple[LayerState, ...]
    hidden: int
    outputs: int
    experts: int
    top_k: int
    deferrable: int
    router_rows: int = 0
    cache: CacheFormat = BF16

    @property
    def layers(self) -> int:
        """The number of decoder layers of the model, L."""
        return len(self.before.ops)

    def cache_work(self, start: int, n_tokens: int) -> tuple[float, float]:
        """Returns (bytes read of the KV cache, operations) of the attention in one layer, on average, for tokens start
        … start + n_tokens - 1.
        """
        read, ops = cache_work(self.states, start, n_tokens, self.cache)
        return read / self.layers, ops / self.layers

    def room(self, budget_bytes: int, layers: range | None = None) -> Room:
        """Returns the memory for experts on the GPU: a `Room` with the budget `budget_bytes`, the number of experts per
        layer, and the bytes of one expert of each MoE layer among `layers` (None: of every MoE layer).
        """
        moe = self.moe[self.routed(layers)] if layers is not None else self.moe
        sizes = tuple(int(size) for size in self.expert.size_bytes[moe])
        return Room(sizes, self.experts, budget_bytes)

    def routed(self, layers: range) -> slice:
        """Returns the slice of the MoE layers that are among `layers`: the rows that these have in a mask [MoE layers,
        E].
        """
        return slice(*np.searchsorted(self.moe, (layers.start, layers.stop)).tolist())


class _LoadSums:
    """The loads of the tensors that were added so far.

    Attributes:
        layers: by part, bytes that are read, operations, and whether an adapter has room, [3, layers].
        moe: the layers with experts.
    """

    def __init__(self, spec: Spec, recipe: Recipe, rooms: Mapping[str, ProductRoom]) -> None:
        self._spec, self._recipe, self._rooms, self._step = spec, recipe, rooms, StepShape(1)
        names = "before", "beside", "expert", "apart"
        self.layers = {name: np.zeros((3, spec.layers)) for name in names}
        self.head, self.moe = PartWork(ModelPart.HEAD, Unit.BF16, 0, 0), set[int]()
        self.near_bytes = np.zeros(spec.layers + 1)
        self.expert_unit = self.apart_unit = Unit.INT8

    def add_apart(self, tensor: Tensor, layer: int) -> None:
        """Adds a tensor of an MLP that is in main memory."""
        work = tensor_work(tensor, self._spec, self._recipe, self._step)
        self.apart_unit = work.unit
        self.layers["apart"][:, layer] += work.read_bytes, work.ops, 0

    def add_experts(self, tensor: Tensor, layer: int) -> None:
        """Adds one expert of a tensor of experts."""
        self.expert_unit = self._work(tensor).unit
        self.moe.add(layer)
        size = stored_bytes(tensor, self._recipe) // tensor.count
        self.layers["expert"][:, layer] += size, 2 * tensor.n * tensor.k, 0

    def add_near(self, tensor: Tensor) -> None:
        """Adds a tensor that is always on the GPU, if there is one, with what an adapter has beside it."""
        work, room = self._work(tensor), self._rooms.get(tensor.name)
        more = 0 if room is None else room.size_bytes
        place = -1 if tensor.layer is None else tensor.layer
        self.near_bytes[place] += bytes_on_device(tensor, self._recipe) + more
        if tensor.layer is None:
            read, ops = self.head.read_bytes + work.read_bytes + more, self.head.ops + work.ops
            self.head = replace(self.head, read_bytes=read, ops=ops)
            return
        name = "beside" if tensor.part.is_mlp else "before"
        added = 0 if room is None else 2 * tensor.count * room.ranks * (tensor.k + tensor.n)
        self.layers[name][:, tensor.layer] += work.read_bytes + more, work.ops + added, bool(more)

    def _work(self, tensor: Tensor) -> PartWork:
        return tensor_work(tensor, self._spec, self._recipe, self._step, bytes_on_device)


def stack_of(
    model: Model,
    recipe: Recipe,
    cache: CacheFormat = BF16,
    adapters: AdapterRoom | None = None,
    apart: Collection[LayerPart] = (),
) -> ModelLoads:
    """Returns the bytes and operations of every layer of a model, part by part, with a cache of this format and room
    for adapters.

    Args:
        apart: the shared experts and dense MLPs that are in main memory.
    """
    spec = model.spec
    sums = _LoadSums(
        spec, recipe, {room.name: room for room in adapters.products} if adapters else {}
    )
    for tensor in model.tensors:
        if tensor.layer is not None and tensor.layer_part in apart:
            sums.add_apart(tensor, tensor.layer)
        elif tensor.layer is not None and tensor.role is Role.EXPERTS:
            sums.add_experts(tensor, tensor.layer)
        elif tensor.role is not Role.TABLE:
            sums.add_near(tensor)
    for layer, state in enumerate(spec.states):
        size = 2 * F32_BYTES * state.sequence_elements  # read and written
        sums.layers["before"][:, layer] += size, state.ops_per_token, 0
    return ModelLoads(
        **{name: Load(*rows) for name, rows in sums.layers.items()},
        moe=np.array(sorted(sums.moe), np.int64),
        head=sums.head,
        near_bytes=sums.near_bytes,
        expert_unit=sums.expert_unit,
        apart_unit=sums.apart_unit,
        states=spec.states,
        hidden=spec.hidden,
        outputs=spec.output_width,
        experts=spec.experts,
        top_k=spec.top_k,
        deferrable=spec.deferrable,
        router_rows=max((t.n for t in model.tensors if t.part is ModelPart.ROUTER), default=0),
        cache=cache,
    )


def split(model: Model, mask: Mask, apart: Collection[LayerPart] = ()) -> tuple[Share, Share]:
    """Returns a model's tensors as two shares, (main memory, GPU): main memory has the embedding, experts that are not
    in the mask and MLPs that are `apart`, the GPU all else.

    Biases of experts are few: the GPU has all of them, main memory those of layers with experts there.
    """
    layers = sorted(
        {t.layer for t in model.tensors if t.role is Role.EXPERTS and t.layer is not None}
    )
    resident = dict(zip(layers, mask.sum(axis=1).tolist(), strict=True))
    host, device = [], []
    for tensor in model.tensors:
        if tensor.role is Role.EXPERTS and tensor.layer is not None:
            there = int(resident[tensor.layer])
            host.append(replace(tensor, count=tensor.count - there))
            device.append(replace(tensor, count=there))
        elif tensor.is_expert_bias and tensor.layer is not None:
            device.append(tensor)
            host += [tensor] if resident[tensor.layer] < tensor.count else []
        else:
            here = tensor.role is Role.TABLE or tensor.layer_part in apart
            (host if here else device).append(tensor)
    return Share(_some(host)), Share(_some(device))


def _some(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.count)


def share_apart(model: Model, part: ModelPart, apart: Collection[LayerPart]) -> float:
    """Returns the share, 0 to 1, of a part's elements that belong to MLPs in main memory, those that `apart` lists."""
    of_it = [tensor for tensor in model.tensors if tensor.part is part]
    away = sum(tensor.elements for tensor in of_it if tensor.layer_part in apart)
    return away / max(1, sum(tensor.elements for tensor in of_it))


def plain_bytes(tensor: Tensor, fmt: Format) -> int:
    """Returns the bytes of each value of a matrix if a GPU stores it as plain rows, 2 for bf16 or 4 for f32; 0 if it
    stays packed, as experts, grouped matrices and formats below 16 bits do.
    """
    if tensor.role is Role.EXPERTS or tensor.count > 1 or fmt.bits < 16:
        return 0
    return F32_BYTES if tensor.role is Role.KEPT or fmt.bits == 32 else BF16_BYTES


def bytes_on_device(tensor: Tensor, recipe: Recipe) -> int:
    """Returns the bytes of a tensor in a GPU's memory: as a recipe stores it, or as plain rows where `plain_bytes` says
    so.
    """
    fmt = format_of(tensor, recipe)
    each = 0 if fmt is None else plain_bytes(tensor, fmt)
    return each * tensor.n * tensor.k if each else stored_bytes(tensor, recipe)
