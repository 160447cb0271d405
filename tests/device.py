"""A model run by the torch backend on the CPU, step by step, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from resident import ResidentRunner

from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.weights import DeviceModel, load_device
from ktcli.engine.loader import PackSource
from ktcli.engine.pagetable import pages_for
from ktcli.models import Model, build
from ktcli.native import PAGE_TOKENS, Pool
from ktcli.ops.kvformat import BF16, F32_CACHE
from ktcli.ops.torch.backend import StepInputs
from ktcli.ops.torch.functions import Rows
from ktcli.ops.torch.kernels import kernels_for
from ktcli.ops.torch.merged import Merged
from ktcli.ops.torch.merging import backend_of
from ktcli.weights.pack import Pack

CPU = torch.device("cpu")


@dataclass
class Timeline:
    """One timeline: its pages and how many positions they hold; the state that is read now, and the one that
    is written."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]
    length: int = 0


@dataclass
class DeviceRun:
    """A model with all experts on the device.

    Attributes:
        routings: of the last step, as the backend noted them.
        merged: kernels that do several operations at once.
    """

    model: Model
    loaded: DeviceModel
    cache: DeviceCache
    exact: bool
    routings: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    merged: Merged | None = None

    @classmethod
    def load(cls, path: Path, *, exact: bool = False, pages: int = 16) -> DeviceRun:
        pack = Pack.open(path)
        model = build(pack.config)
        mask = np.ones((model.spec.moe_layers, model.spec.experts), dtype=bool)
        loaded = load_device(
            model, pack.recipe, PackSource(pack, Pool(1)), mask, (CPU,) * model.spec.layers
        )
        cache = DeviceCache(
            model.spec,
            pages,
            (CPU,) * model.spec.layers,
            slots=2 * pages,
            fmt=F32_CACHE if exact else BF16,
        )
        for layer in (*cache.layers, *cache.states):
            layer.fill_(float("nan"))  # what was not written must not matter
        return cls(model, loaded, cache, exact)

    def sequence(self, positions: int) -> Timeline:
        return Timeline(
            tuple(self.cache.pages.take(pages_for(positions))),
            (self.cache.slots.take(), self.cache.slots.take()),
        )

    def give_back(self, sequence: Timeline) -> None:
        for page in sequence.pages:
            self.cache.pages.release(page)
        for slot in sequence.slots:
            self.cache.slots.release(slot)

    def step(self, ids: Sequence[Sequence[int]], of: Sequence[Timeline]) -> NDArray[np.float32]:
        """Logits [sequences, run, vocab] of the next ids of each sequence."""
        run = len(ids[0])
        flat = torch.tensor([i for each in ids for i in each])
        rows = replace(self._rows(of, run), ids=flat)
        x = self.loaded.embedding[flat].float()
        kernels = replace(kernels_for(CPU, exact=self.exact), merged=self.merged)
        runner = ResidentRunner(kernels, self.loaded.stacks)
        inputs = StepInputs(x, (rows,), self.cache.layers, states=self.cache.states)
        backend = backend_of(self.loaded.weights, inputs, kernels, runner)
        logits = backend.run(self.model.forward)
        self.routings = backend.routings
        for each in of:
            each.length += run
            each.slots = each.slots[::-1]
        return logits.view(len(of), run, -1).numpy()

    def feed(self, ids: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float32]:
        """Logits [T, vocab] of a new sequence, fed in pieces of these sizes; the rest like the last."""
        sequence, out, at, n = self.sequence(len(ids)), [], 0, 0
        while at < len(ids):
            size = sizes[min(n, len(sizes) - 1)]
            out.append(self.step([ids[at : at + size]], [sequence])[0])
            at, n = at + size, n + 1
        self.give_back(sequence)
        return np.concatenate(out)

    def _rows(self, of: Sequence[Timeline], run: int) -> Rows:
        positions = [each.length + i for each in of for i in range(run)]
        most = max(pages_for(each.length + run) for each in of)
        # A step of single rows gets its whole page table, of equal length for all, as a captured one does.
        if run == 1:
            most = max(len(each.pages) for each in of)
        table = [[*each.pages, *[self.cache.scratch] * most][:most] for each in of]
        assert max(positions) < PAGE_TOKENS * most
        read = [each.slots[0] if each.length else -1 for each in of]
        slots = torch.tensor([read, [each.slots[1] for each in of]])
        return Rows(torch.tensor(positions), torch.tensor(table, dtype=torch.int32), run, slots)
