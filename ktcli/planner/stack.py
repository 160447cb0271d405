"""Describes a model as layers of loads: what each decoder layer stores and computes per token, part by part.

`spec` counts a whole step; a plan with a GPU needs each layer by itself, because CPU and GPU work at the
same time and wait for each other layer by layer. Both count the same tensors by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ktcli.models.model import Model
from ktcli.native import Format
from ktcli.ops.kvformat import BF16, CacheFormat
from ktcli.ops.part import ModelPart
from ktcli.ops.state import LayerState
from ktcli.ops.tensors import Role, Tensor
from ktcli.planner.experts import Mask, Room
from ktcli.planner.spec import (
    PartWork,
    Share,
    StepShape,
    Unit,
    cache_work,
    tensor_work,
)
from ktcli.weights.recipe import BF16_BYTES, F32_BYTES, Recipe, format_of, stored_bytes

F64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes stored in each layer, [L], and the operations per token, [L] (a multiply and an add are two)."""

    size_bytes: F64Array
    ops: F64Array


@dataclass(frozen=True, slots=True)
class ModelLoads:
    """The layers of one model in one recipe.

    Attributes:
        before: the load of attention projections, norms and router.
        beside: the load of shared experts or the dense MLP.
        expert: the load of one routed expert; zero in dense layers.
        moe: the numbers of the layers with routed experts.
        head: the bytes and operations of the output head for one row.
        near_bytes: the bytes of each layer that lie on a GPU whatever the mask, and last those of the head, [L + 1].
        expert_unit: the loop that experts run in on the CPU.
        states: the state that each layer keeps of a sequence.
        hidden, outputs, experts, top_k: the sizes of the model; outputs: the width of the rows that a step gives.
        deferrable: see `Spec.deferrable`.
        router_rows: the rows of a router's weight; more than experts where it has the gate of the shared one, too.
        cache: the number format of the cache.
    """

    before: Load
    beside: Load
    expert: Load
    moe: NDArray[np.int64]
    head: PartWork
    near_bytes: F64Array
    expert_unit: Unit
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
        """The number of layers, L."""
        return len(self.before.ops)

    def cache_work(self, start: int, n_tokens: int) -> tuple[float, float]:
        """Returns the mean bytes read of the cache and operations of one layer, for tokens start … start + n_tokens
        - 1."""
        read, ops = cache_work(self.states, start, n_tokens, self.cache)
        return read / self.layers, ops / self.layers

    def room(self, budget_bytes: int, layers: range | None = None) -> Room:
        """Returns the memory that a mask of these layers, or of all, may fill."""
        moe = self.moe[self.routed(layers)] if layers is not None else self.moe
        sizes = tuple(int(size) for size in self.expert.size_bytes[moe])
        return Room(sizes, self.experts, budget_bytes)

    def routed(self, layers: range) -> slice:
        """Returns the rows of a mask that belong to these layers, as a slice."""
        return slice(*np.searchsorted(self.moe, (layers.start, layers.stop)).tolist())


def stack_of(model: Model, recipe: Recipe, cache: CacheFormat = BF16) -> ModelLoads:
    """Returns the loads of every layer of a model, with a cache of this format."""
    spec, one = model.spec, StepShape(1)
    sums = {name: np.zeros((2, spec.layers)) for name in ("before", "beside", "expert")}
    head, unit, moe = PartWork(ModelPart.HEAD, Unit.BF16, 0, 0), Unit.INT8, set()
    near_bytes = np.zeros(spec.layers + 1)
    for tensor in model.tensors:
        work = tensor_work(tensor, spec, recipe, one, bytes_on_device)
        if tensor.role not in (Role.TABLE, Role.EXPERTS):
            place = -1 if tensor.layer is None else tensor.layer
            near_bytes[place] += bytes_on_device(tensor, recipe)
        if tensor.layer is None:
            if tensor.role is not Role.TABLE:
                head = replace(
                    head, read_bytes=head.read_bytes + work.read_bytes, ops=head.ops + work.ops
                )
        elif tensor.role is Role.EXPERTS:
            unit = work.unit
            moe.add(tensor.layer)
            size = stored_bytes(tensor, recipe) // tensor.count
            sums["expert"][:, tensor.layer] += size, 2 * tensor.n * tensor.k
        else:
            name = "beside" if tensor.part.runs_beside_experts else "before"
            sums[name][:, tensor.layer] += work.read_bytes, work.ops
    for layer, state in enumerate(spec.states):
        size = 2 * F32_BYTES * state.sequence_elements  # read and written
        sums["before"][:, layer] += size, state.ops_per_token
    return ModelLoads(
        **{name: Load(*rows) for name, rows in sums.items()},
        moe=np.array(sorted(moe), np.int64),
        head=head,
        near_bytes=near_bytes,
        expert_unit=unit,
        states=spec.states,
        hidden=spec.hidden,
        outputs=spec.output_width,
        experts=spec.experts,
        top_k=spec.top_k,
        deferrable=spec.deferrable,
        router_rows=max((t.n for t in model.tensors if t.part is ModelPart.ROUTER), default=0),
        cache=cache,
    )


def split(model: Model, mask: Mask) -> tuple[Share, Share]:
    """Returns a model's tensors as two shares: of main memory (embedding and other experts) and of the GPU (all
    else).

    Biases of experts are few: both have all of them.
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
            (host if tensor.role is Role.TABLE else device).append(tensor)
    return Share(_some(host)), Share(_some(device))


def _some(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor.count)


def plain_bytes(tensor: Tensor, fmt: Format) -> int:
    """Returns the bytes of each value of a matrix that lies on a GPU as plain rows; 0: it stays packed.

    Matrices of plain numbers that are used alone are rows, for the vendor's products; those that are kept
    exact are f32, as they are computed so.
    """
    if tensor.role is Role.EXPERTS or tensor.count > 1 or fmt.bits < 16:
        return 0
    return F32_BYTES if tensor.role is Role.KEPT or fmt.bits == 32 else BF16_BYTES


def bytes_on_device(tensor: Tensor, recipe: Recipe) -> int:
    """Returns the bytes of a tensor on a GPU: as stored, or those of plain rows (see `plain_bytes`)."""
    fmt = format_of(tensor, recipe)
    each = 0 if fmt is None else plain_bytes(tensor, fmt)
    return each * tensor.n * tensor.k if each else stored_bytes(tensor, recipe)
