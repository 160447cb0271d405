"""Adapters of random numbers for all products of an engine, made without files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ktcli.adapters.packed import PackedAdapter
from ktcli.engine import CpuEngine
from ktcli.engine.adapters import AttachedAdapter
from ktcli.native import PANEL_ROWS, Update
from ktcli.ops.tensors import Role, Tensor, ceil_to
from ktcli.planner.memory import AdapterRoom, ProductRoom

ROOM = AdapterRoom(4, 16, 1 << 26)


def random_adapter(engine: CpuEngine, seed: int, size: float = 0.1) -> PackedAdapter:
    """Two updates of each product, of all of its rows and of every second panel, of ranks from 1 to 8; a gain of each
    norm."""
    draw = np.random.default_rng(seed)
    tensors = {tensor.name: tensor for tensor in engine.model.tensors}
    assert engine.adapters is not None
    names = [name for name in engine.adapters.products if name in tensors]
    updates = {
        name: (_update(tensors[name], draw, size, 1), _update(tensors[name], draw, size, 2))
        for name in names
    }
    widths = {name: tensors[name].k for name in engine.adapters.norms if name in tensors}
    gains = {name: draw.uniform(0.8, 1.2, k).astype(np.float32) for name, k in widths.items()}
    return PackedAdapter(f"made{seed}", f"{seed:064x}", updates, gains)


def room_beside(engine: CpuEngine, *adapters: PackedAdapter) -> AdapterRoom:
    """The room that an engine with a device needs for some adapters of an engine's model."""
    rooms: dict[str, ProductRoom] = {}
    for adapter in adapters:
        for tensor in engine.model.tensors:
            if tensor.name in adapter.updates and tensor.role is not Role.EXPERTS:
                own = _room(tensor, adapter.updates[tensor.name])
                rooms[tensor.name] = own.covering(rooms.get(tensor.name, own))
    experts = [name for adapter in adapters for name in adapter.updates if name not in rooms]
    return replace(ROOM, experts_bytes=len(experts), products=tuple(rooms.values()))


def _room(tensor: Tensor, updates: Sequence[Update]) -> ProductRoom:
    counts = max(len(each.a) for each in updates), max(len(each.b) for each in updates)
    ranks = sum(each.rank for each in updates)
    return ProductRoom(
        tensor.name, tensor.layer, ranks, tensor.k, tensor.n, tensor.count > 1, *counts
    )


def _update(tensor: Tensor, draw: np.random.Generator, size: float, step: int) -> Update:
    count, rank = tensor.count, int(draw.integers(1, 9))
    panels = -(-ceil_to(tensor.n, PANEL_ROWS) // PANEL_ROWS // step)
    a = np.zeros((count, rank, ceil_to(tensor.k, PANEL_ROWS)), np.float32)
    a[:, :, : tensor.k] = size * draw.standard_normal((count, rank, tensor.k))
    b = size * draw.standard_normal((count, panels, rank, PANEL_ROWS)).astype(np.float32)
    made = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in (a, b)]
    if step == 1:
        return Update(rank, 0, step, 1.5, *made)
    return Update(rank, 0, step, -0.5, a, b)  # in f32


def attach(engine: CpuEngine, seed: int) -> AttachedAdapter:
    """A random adapter that is attached."""
    assert engine.adapters is not None
    return engine.adapters.attach(random_adapter(engine, seed))
