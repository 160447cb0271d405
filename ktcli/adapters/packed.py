"""Packs the factors of an adapter for the CPU's kernels, which compute its updates together with a model's products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ktcli.adapters.adapter import Adapter, LowRank, NewGain
from ktcli.adapters.factors import F32, as_bf16
from ktcli.errors import UsageError
from ktcli.native import PANEL_ROWS, Update
from ktcli.ops.tensors import Role, Tensor, ceil_to
from ktcli.weights.columns import suffers
from ktcli.weights.recipe import Recipe, format_of

# Rows of B that are turned at a time: experts alternate in the file, and the CPU's cache holds so many.
_ROWS_AT_ONCE = 128


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
        """The most ranks that the updates of one product have together."""
        return max((sum(u.rank for u in each) for each in self.updates.values()), default=1)

    @property
    def size_bytes(self) -> int:
        """The bytes of all factors and gains."""
        factors = sum(u.a.nbytes + u.b.nbytes for each in self.updates.values() for u in each)
        return factors + sum(gain.nbytes for gain in self.gains.values())


def pack_adapter(adapter: Adapter, name: str, recipe: Recipe, *, exact: bool) -> PackedAdapter:
    """Returns an adapter with its factors packed; all of them are read.

    Args:
        name: its name for people.
        recipe: the number formats of the model that it is used with.
        exact: whether factors are f32; else bf16, rounded to nearest even where they are not.
    Raises:
        UsageError: it changes something that kernels cannot change beside the model.
        BadCheckpoint: a factor is NaN or Inf, or a file cannot be read.
    """
    _require_unscaled(adapter, name, recipe)
    found: dict[str, list[Update]] = {}
    for update in adapter.updates:
        found.setdefault(update.tensor.name, []).append(_packed(adapter, update, exact))
    updates = {tensor: tuple(each) for tensor, each in found.items()}
    gains = {gain.tensor.name: stored_gain(gain, adapter.gain(gain)) for gain in adapter.gains}
    return PackedAdapter(name, adapter.digest, updates, gains)


def stored_gain(gain: NewGain, values: F32) -> F32:
    """Returns a norm's gain [k] as the model has it, from its values as checkpoints have them."""
    (piece,) = gain.tensor.sources[0]
    chosen = values[piece.first : piece.first + piece.rows * piece.step : piece.step]
    return np.ascontiguousarray(chosen + np.float32(piece.plus), np.float32)


def ranks_of(adapter: Adapter) -> int:
    """Returns the most ranks that the updates of one product have together; no number is read."""
    ranks: dict[str, int] = {}
    for update in adapter.updates:
        ranks[update.tensor.name] = ranks.get(update.tensor.name, 0) + update.rank
    return max(ranks.values(), default=1)


def packed_bytes(adapter: Adapter, *, exact: bool) -> tuple[int, int]:
    """Returns the bytes that the factors of an adapter have when they are packed, those of routed experts apart behind
    the others'; no number is read."""
    sizes = [0, 0]
    for update in adapter.updates:
        (count, rank, k), _ = update.shapes
        panels = _panels(update.rows)[2]
        counts = (1, count) if update.taken.ndim > 1 else (count, count)
        of_a, of_b = reversed(counts) if update.flipped else counts
        size = rank * (of_a * ceil_to(k, PANEL_ROWS) + of_b * panels * PANEL_ROWS)
        sizes[update.tensor.role is Role.EXPERTS] += size * (4 if exact else 2)
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


def _packed(adapter: Adapter, update: LowRank, exact: bool) -> Update:
    a, b = (_without_copies(each) for each in adapter.factors(update))
    first, step, panels = _panels(update.rows)
    _, rank, k = a.shape
    kept = np.float32 if exact else np.uint16
    wide = np.zeros((len(a), rank, ceil_to(k, PANEL_ROWS)), kept)
    wide[:, :, :k] = _stored(a, exact)
    tall = np.zeros((len(b), panels, rank, PANEL_ROWS), kept)
    panel, lane = np.divmod(update.rows, PANEL_ROWS)
    for at in range(0, len(panel), _ROWS_AT_ONCE):
        rows = slice(at, at + _ROWS_AT_ONCE)
        some = _stored(b[:, rows], exact)
        tall[:, (panel[rows] - first) // step, :, lane[rows]] = some.transpose(1, 0, 2)
    return Update(rank, first, step, float(update.scale), wide, tall)


def _without_copies(factor: F32) -> F32:
    """One matrix of those that all are the same memory, else the factor."""
    return factor[:1] if factor.strides[0] == 0 else factor


def _panels(rows: NDArray[np.int32]) -> tuple[int, int, int]:
    """The first of the panels that some rows lie in, the distance from each to the next, and their number: every one
    from the first to the last, or every second where gate or up alone is changed."""
    panels = np.unique(rows // PANEL_ROWS)
    first, last = int(panels[0]), int(panels[-1])
    steps = np.unique(np.diff(panels))
    step = int(steps[0]) if steps.size == 1 else 1
    return first, step, (last - first) // step + 1


def _stored(values: F32, exact: bool) -> NDArray[np.uint16] | F32:
    return values if exact else as_bf16(values)
