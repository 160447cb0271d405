"""Random adapters of a model's shapes for `gpu_sections`, and the room that they need beside a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ktcli.adapters.packed import PackedAdapter
from ktcli.models import Model
from ktcli.native import PANEL_ROWS, Update
from ktcli.ops.native import multiplied
from ktcli.ops.part import ModelPart
from ktcli.ops.recording import record
from ktcli.ops.tensors import Role, Tensor, ceil_to
from ktcli.planner.memory import AdapterRoom, ProductRoom

RANK = 8


def made(model: Model, *, experts: bool) -> tuple[PackedAdapter, AdapterRoom]:
    """Returns an adapter of every product of the layers but routers, and of routed experts only if asked."""
    draw, updates, rooms, size = np.random.default_rng(1), {}, [], [0, 0]
    for tensor in _products(model):
        routed = tensor.role is Role.EXPERTS
        if routed and not experts:
            continue
        update = _update(tensor, draw)
        updates[tensor.name] = (update,)
        size[routed] += update.a.nbytes + update.b.nbytes
        if not routed:
            each = tensor.count > 1, tensor.count, tensor.count
            rooms.append(ProductRoom(tensor.name, tensor.layer, RANK, tensor.k, tensor.n, *each))
    room = AdapterRoom(1, RANK, sum(size), size[False], size[True], tuple(rooms))
    return PackedAdapter("made", "0" * 64, updates), room


def _products(model: Model) -> Iterator[Tensor]:
    for each in record(model.forward).records:
        for tensor in multiplied(each.operation):
            if tensor.layer is not None and tensor.part is not ModelPart.ROUTER:
                yield tensor


def _update(tensor: Tensor, draw: np.random.Generator) -> Update:
    panels = ceil_to(tensor.n, PANEL_ROWS) // PANEL_ROWS
    shapes = (tensor.count, RANK, ceil_to(tensor.k, PANEL_ROWS)), (tensor.count, panels, RANK, 16)
    a, b = (draw.integers(0x3A00, 0x3C00, shape, np.uint16) for shape in shapes)  # bf16, small
    a[:, :, tensor.k :] = 0
    return Update(RANK, 0, 1, 1.0, a, b)
