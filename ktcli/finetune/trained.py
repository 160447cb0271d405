"""Trained factors as an adapter: written in peft's layout by the exporter of adapters, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ktcli.adapters.adapter import Adapter, LoraPair
from ktcli.adapters.export import AdapterLayout, Exporter
from ktcli.adapters.factors import F32, Factor, FactorPacking
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.patterns import Patterns
from ktcli.adapters.settings import AdapterSettings
from ktcli.adapters.targets import Targets, own_spelling
from ktcli.errors import UsageError
from ktcli.training.lora import TrainedFactors
from ktcli.training.model import TrainableModel
from ktcli.weights.files import OpenFiles
from ktcli.weights.header import TensorEntry
from ktcli.weights.storage import Part


class TrainedAdapter(Adapter):
    """An adapter whose values are in memory: the current ones of trained factors."""

    def values(self, pair: LoraPair) -> tuple[F32, F32]:
        """Returns the current LoRA factors of a pair: (A [count, r, k], B [count, n, r]), f32; count: the matrices of
        its target.
        """
        a, b = self._factors[own_spelling(pair.target.name)].values
        return a.numpy(), b.numpy()

    @classmethod
    def of(cls, trained: TrainableModel, base: str, *, rslora: bool) -> TrainedAdapter:
        """Returns the trained factors of a model as a LoRA adapter, in memory, whose config names the base model
        `base`.
        """
        pairs = tuple(_pair(each) for each in trained.factors.values())
        first = next(iter(trained.factors.values()))
        settings = AdapterSettings(
            base, first.rank, first.alpha, rslora, Patterns("rank_pattern", {}), Patterns("alpha_pattern", {}),
            modules=(), parameters=(), saved=(), dropout=0.0, version=(),
        )  # fmt: skip
        tensors = Targets(trained.model).tensors
        made = cls(settings, tensors, pairs, (), OpenFiles({}, ""), Path(), ())
        object.__setattr__(made, "_factors", trained.factors)
        return made

    _factors: Mapping[str, TrainedFactors]


def write_trained(trained: TrainableModel, folder: Path, base: str, *, rslora: bool) -> None:
    """Writes the trained factors of a model to a folder as an adapter in peft's format, in f32.

    Raises:
        OSError: a file cannot be written.
    """
    adapter = TrainedAdapter.of(trained, base, rslora=rslora)
    Exporter(adapter, trained.model).write(folder, AdapterLayout.PEFT)


def fill_factors(trained: TrainableModel, folder: Path) -> None:
    """Loads the LoRA factors of the adapter in a folder into a model's trained factors, which must have the same
    targets, ranks and scales.

    Raises:
        NotFound, BadCheckpoint: there is no adapter, it is damaged, or it is for another model.
        UsageError: it changes other targets, or has other ranks or scales.
    """
    with open_adapter(folder, trained.model) as adapter:
        found = {own_spelling(pair.target.name): pair for pair in adapter.pairs}
        _require_same(found, trained, folder)
        for name, pair in found.items():
            a, b = adapter.values(pair)
            trained.factors[name].fill(_tensor(a), _tensor(b))


def _require_same(found: Mapping[str, LoraPair], trained: TrainableModel, folder: Path) -> None:
    hint = "use the lora_target, lora_rank and lora_alpha that it was trained with"
    if different := sorted(found.keys() ^ trained.factors.keys()):
        has = "changes" if different[0] in found else "does not change"
        raise UsageError(
            f"the adapter in {folder} {has} {different[0]}, other than this run would", hint=hint
        )
    for name, pair in found.items():
        own = trained.factors[name]
        if (pair.rank, pair.scale) != (own.rank, own.scale):
            raise UsageError(
                f"the adapter in {folder} has rank {pair.rank} and scale {pair.scale:g} at {name}, "
                f"this run rank {own.rank} and scale {own.scale:g}",
                hint=hint,
            )


def _pair(each: TrainedFactors) -> LoraPair:
    t = each.target
    a = (t.count, each.rank, t.k)
    b = (t.count, t.n, each.rank)
    return LoraPair(t, each.name, _factor(a), _factor(b), each.alpha, each.scale)


def _factor(shape: tuple[int, int, int]) -> Factor:
    """A factor of this shape that lies in no file."""
    count, rows, columns = shape
    entry = TensorEntry("F32", shape, 0, 4 * count * rows * columns)
    return Factor((Part("", "", entry),), FactorPacking.STACKED, shape)


def _tensor(values: F32) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
