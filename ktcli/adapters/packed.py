"""Packs the factors of an adapter for the CPU's kernels, which compute its updates together with a model's products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli.adapters.adapter import Adapter, LowRank, NewGain
from ktcli.adapters.factors import F32
from ktcli.adapters.targets import Rows
from ktcli.errors import UsageError
from ktcli.native import PANEL_ROWS, Arena, BadNumber, Update, pack_a, pack_b
from ktcli.ops.tensors import Role, Tensor, ceil_to
from ktcli.planner.memory import ProductRoom
from ktcli.records import dataclass
from ktcli.weights.columns import suffers
from ktcli.weights.recipe import Recipe, format_of

_ALIGNED = 64  # bytes at which a factor begins: of a line of the CPU's cache


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter whose factors are in memory as kernels read them.

    Attributes:
        digest: the SHA-256 of its files, hexadecimal.
        updates: those of each product, by the name of the stored tensor that is multiplied with.
        gains: those of norms that it replaces, f32, by the name of the stored vector.
    """

    name: str
    digest: str
    updates: Mapping[str, tuple[Update, ...]]
    gains: Mapping[str, F32] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The largest sum of the LoRA ranks of all updates of one matrix product; 1 if there are no updates."""
        return max((sum(u.rank for u in each) for each in self.updates.values()), default=1)

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the packed factors and the norm gains take in memory."""
        factors = sum(u.a.nbytes + u.b.nbytes for each in self.updates.values() for u in each)
        return factors + sum(gain.nbytes for gain in self.gains.values())


def pack_adapter(adapter: Adapter, name: str, recipe: Recipe, *, exact: bool) -> PackedAdapter:
    """Returns an adapter in memory, with its factors packed in the layout that the CPU's kernels read.

    Args:
        name: its name for people.
        recipe: the number formats of the model that it is used with.
        exact: whether factors are f32; else bf16, rounded to nearest even where they are not.
    Raises:
        UsageError: the adapter changes weights that the conversion rescaled by factors that it did not store.
        BadCheckpoint: a factor or norm gain is NaN or Inf, or a file cannot be read.
    """
    _require_unscaled(adapter, name, recipe)
    layouts = [_Layout.of(update) for update in adapter.updates]
    packer = _Packer(adapter, layouts, exact=exact)
    found: dict[str, list[Update]] = {}
    for update, layout in zip(adapter.updates, layouts, strict=True):
        found.setdefault(update.tensor.name, []).append(packer.packed(update, layout))
    updates = {tensor: tuple(each) for tensor, each in found.items()}
    gains = {gain.tensor.name: stored_gain(gain, adapter.gain(gain)) for gain in adapter.gains}
    return PackedAdapter(name, adapter.digest, updates, gains)


def stored_gain(gain: NewGain, values: F32) -> F32:
    """Returns a norm's gain [k], f32, as the model stores it, from the norm's weights as checkpoints have them: some
    models store 1 + weight.
    """
    (piece,) = gain.tensor.sources[0]
    chosen = values[piece.first : piece.first + piece.rows * piece.step : piece.step]
    return np.ascontiguousarray(chosen + np.float32(piece.plus), np.float32)


def ranks_of(adapter: Adapter) -> int:
    """Returns the largest sum of the LoRA ranks of an adapter's updates of one stored tensor; 1 if there are no
    updates. No number is read from the files.
    """
    ranks: dict[str, int] = {}
    for update in adapter.updates:
        ranks[update.tensor.name] = ranks.get(update.tensor.name, 0) + update.rank
    return max(ranks.values(), default=1)


def product_rooms(adapter: Adapter) -> tuple[ProductRoom, ...]:
    """Returns one record for each stored tensor with low-rank updates of an adapter: the sizes of its updates (sum of
    ranks, inputs, outputs, numbers of matrices), for reserving memory on devices. Routed experts are left out, and no
    number is read from the files.
    """
    found: dict[str, ProductRoom] = {}
    for update in adapter.updates:
        tensor, layout = update.tensor, _Layout.of(update)
        if tensor.role is Role.EXPERTS:
            continue
        before = found.get(tensor.name)
        found[tensor.name] = ProductRoom(
            tensor.name,
            tensor.layer,
            update.rank + (before.ranks if before else 0),
            tensor.k,
            tensor.n,
            tensor.count > 1,
            max(layout.shape_a[0], before.a_count if before else 1),
            max(layout.shape_b[0], before.b_count if before else 1),
        )
    return tuple(found.values())


def packed_bytes(adapter: Adapter, *, exact: bool) -> tuple[int, int]:
    """Returns the bytes that an adapter takes in memory when it is packed, as (bytes of everything but routed experts,
    norm gains included; bytes of routed experts). No number is read from the files.

    Args:
        exact: whether factors are packed as f32; else as bf16.
    """
    sizes = [0, 0]
    for update in adapter.updates:
        layout = _Layout.of(update)
        numbers = prod(layout.shape_a) + prod(layout.shape_b)
        sizes[update.tensor.role is Role.EXPERTS] += numbers * (4 if exact else 2)
    sizes[0] += sum(4 * gain.tensor.k for gain in adapter.gains)
    return sizes[0], sizes[1]


def _require_unscaled(adapter: Adapter, name: str, recipe: Recipe) -> None:
    """Checks that an adapter changes no matrix whose columns the conversion has scaled, nor the norm before it. The
    factors are in no file: the matrix has been divided by them and the norm's gain multiplied with them, and neither
    can be told from what it was before.

    Raises:
        UsageError: it does.
    """
    scaled: dict[str, Tensor] = {}
    for tensor in adapter.tensors:
        fmt = format_of(tensor, recipe)
        if tensor.gain is not None and fmt is not None and suffers(fmt):
            scaled |= {tensor.name: tensor, tensor.gain.name: tensor}
    changed = [(update.tensor, update.pair.module) for update in adapter.updates]
    changed += [(gain.tensor, gain.module) for gain in adapter.gains]
    for tensor, module in changed:
        if tensor.name in scaled:
            fmt = format_of(scaled[tensor.name], recipe)
            assert fmt is not None
            raise UsageError(
                f"the adapter {name} changes {module}, which this conversion to {fmt.name} rescaled by factors that "
                "it did not store, so the adapter cannot be applied to it",
                hint=f"use a conversion with --dense bf16, or merge it: kt convert MODEL --adapter {name}",
            )


class _Layout(NamedTuple):
    """Where an update lies when it is packed.

    Attributes:
        first_panel: of its rows; each panel_step-th from there on is one of B's: every one, or every second where gate
            or up alone is changed.
        shape_a, shape_b: one matrix where all are the same.
    """

    first_panel: int
    panel_step: int
    shape_a: tuple[int, int, int]
    shape_b: tuple[int, int, int, int]

    @classmethod
    def of(cls, update: LowRank) -> _Layout:
        """Returns the layout of an update; no number is read."""
        (count, rank, k), _ = update.shapes
        counts = (1, count) if update.taken.ndim > 1 else (count, count)
        of_a, of_b = reversed(counts) if update.flipped else counts
        panels = np.unique(update.rows // PANEL_ROWS)
        first, last = int(panels[0]), int(panels[-1])
        steps = np.unique(np.diff(panels))
        step = int(steps[0]) if steps.size == 1 else 1
        there = (last - first) // step + 1
        wide = of_a, rank, ceil_to(k, PANEL_ROWS)
        return cls(first, step, wide, (of_b, there, rank, PANEL_ROWS))

    def lanes(self, rows: Rows) -> NDArray[np.int32]:
        """Returns which of the update's rows each row of B's panels is; -1: none."""
        made = np.full(self.shape_b[1] * PANEL_ROWS, -1, np.int32)
        panel, lane = np.divmod(rows, PANEL_ROWS)
        there = (panel - self.first_panel) // self.panel_step
        made[there * PANEL_ROWS + lane] = np.arange(len(rows))
        return made


class _Packer:
    """Packs the updates of one adapter into memory that is taken once: each number is read and written once, and other
    threads can use the interpreter meanwhile."""

    def __init__(self, adapter: Adapter, layouts: Sequence[_Layout], *, exact: bool) -> None:
        self._adapter, self._dtype = adapter, np.dtype(np.float32 if exact else np.uint16)
        numbers = [prod(shape) for each in layouts for shape in (each.shape_a, each.shape_b)]
        self._arena = Arena(sum(map(self._bytes, numbers))).bytes
        self._used = 0
        sizes = (each.pair.size_bytes for each in adapter.updates)
        self._room = np.empty(max(sizes, default=0), np.uint8)

    def packed(self, update: LowRank, layout: _Layout) -> Update:
        """Returns an update, packed.

        Raises:
            BadCheckpoint: a factor is NaN or Inf, or a file cannot be read.
        """
        a, b = (_without_copies(each) for each in self._adapter.stored(update, self._room))
        wide, tall = self._taken(layout.shape_a), self._taken(layout.shape_b)
        try:
            pack_a(a, wide)
            pack_b(b, layout.lanes(update.rows), tall)
        except BadNumber:
            self._adapter.factors(update)  # raises, with the name of the tensor
            raise
        scale = float(update.scale)
        return Update(update.rank, layout.first_panel, layout.panel_step, scale, wide, tall)

    def _taken(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of zeros of the memory that is left."""
        first, size = self._used, prod(shape) * self._dtype.itemsize
        self._used += self._bytes(prod(shape))
        return self._arena[first : first + size].view(self._dtype).reshape(shape)

    def _bytes(self, numbers: int) -> int:
        return ceil_to(numbers * self._dtype.itemsize, _ALIGNED)


def _without_copies(factor: NDArray[Any]) -> NDArray[Any]:
    """One matrix of those that all are the same memory, else the factor."""
    return factor[:1] if factor.strides[0] == 0 else factor
