"""Measures the size of each matrix's inputs while a model reads a text; a calibrated conversion weights errors by it.

The error of a product is the error of each weight times the input of its column; so a column whose inputs are
large counts more. The model is run in torch, in f32, from a conversion of it, all layers in memory; the text is read
in windows, several at a time, so that each matrix is un-packed once for some thousand tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktcli.engine.device.cache import DeviceCache
from ktcli.engine.device.weights import load_device
from ktcli.engine.loader import PackSource, expert_rows
from ktcli.engine.pagetable import pages_for
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.ops.kvformat import F32_CACHE
from ktcli.ops.operation import Operation
from ktcli.ops.table.rowwise import Linear
from ktcli.ops.tensors import Cut, Role, Tensor
from ktcli.ops.torch.backend import ExpertRunner, StepInputs, TorchBackend
from ktcli.ops.torch.functions import Rows, product, swiglu
from ktcli.ops.torch.kernels import EXACT
from ktcli.ops.torch.packed import PackedStack, unpack
from ktcli.weights.importance import Importance, measured, steps_of
from ktcli.weights.pack import Pack

WINDOW = 512  # tokens read from an empty cache
AT_ONCE = 4  # windows read together


@dataclass
class _Sums:
    """The sums over the inputs of one tensor's matrices: squares [count, k], and the number of rows [count]."""

    squares: NDArray[np.float64]
    rows: NDArray[np.float64]

    @classmethod
    def of(cls, tensor: Tensor) -> _Sums:
        return cls(np.zeros((tensor.count, tensor.k)), np.zeros(tensor.count))

    def add(self, index: int, x: torch.Tensor) -> None:
        """Adds the inputs x [T, K] of matrix `index`."""
        self.squares[index] += x.double().square().sum(0).numpy()
        self.rows[index] += len(x)


class _Listener(TorchBackend):
    """A backend that sums up the inputs of dense matrices."""

    sums: dict[str, _Sums]

    def do(self, operation: Operation) -> Any:
        if isinstance(operation, Linear) and operation.weight.name in self.sums:
            self.sums[operation.weight.name].add(0, operation.x)
        return super().do(operation)


class _Experts(ExpertRunner):
    """Computes all experts, one after the other, and sums up the inputs of both of their matrices."""

    def __init__(
        self,
        stacks: Sequence[PackedStack],
        names: Sequence[tuple[str, str]],
        sums: dict[str, _Sums],
    ) -> None:
        self._stacks, self._names, self._sums = stacks, names, sums

    def start(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        gate: torch.Tensor,
        *,
        sent: bool = False,
    ) -> Any:
        stack = self._stacks[layer]
        into_gate_up, into_down = (self._sums[name] for name in self._names[layer])
        out = x.new_zeros(x.shape[0], stack.down.n)
        for expert in torch.unique(ids[ids >= 0]).tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            own, extras = x[rows], stack.extras
            wide = product(own, unpack(stack.gate_up, expert, torch.float32), exact=True)
            if extras.gate_up_bias is not None:
                wide = wide + extras.gate_up_bias[expert]
            hidden = swiglu(wide, stack.down.k, extras.glu)
            y = product(hidden, unpack(stack.down, expert, torch.float32), exact=True)
            if extras.down_bias is not None:
                y = y + extras.down_bias[expert]
            out.index_add_(0, rows, y * gate[rows, slots][:, None])
            into_gate_up.add(expert, own)
            into_down.add(expert, hidden)
        return out

    def finish(self, pending: Any) -> torch.Tensor:
        found: torch.Tensor = pending
        return found


def calibrate(
    path: Pack, pool: Pool, ids: Sequence[int], begin: int | None, progress: Callable[[int], None]
) -> Importance:
    """Returns the importance of the columns of a model's matrices.

    Args:
        path: a conversion of the model.
        ids: the ids of the text.
        begin: the id before each window; None: the model has none.
        progress: called with the tokens read so far.
    """
    model = build(path.config).at(WINDOW)
    sums = {tensor.name: _Sums.of(tensor) for tensor in measured(model)}
    everything = np.ones((model.spec.moe_layers, model.spec.experts), dtype=bool)
    device = torch.device("cpu")
    loaded = load_device(
        model, path.recipe, PackSource(path, pool), everything, (device,) * model.spec.layers
    )
    runner = _Experts(loaded.stacks, _names(model), sums)
    step = WINDOW - (begin is not None)
    windows = [ids[at : at + step] for at in range(0, len(ids), step)]
    done = 0
    while windows:
        size = len(windows[0])
        some = [each for each in windows[:AT_ONCE] if len(each) == size]
        windows = windows[len(some) :]
        read = [([] if begin is None else [begin]) + list(each) for each in some]
        length, pages = len(read[0]), pages_for(len(read[0]))
        count = len(read)
        cache = DeviceCache(
            model.spec, pages * count, (device,) * model.spec.layers, slots=2 * count, fmt=F32_CACHE
        )
        table = torch.tensor([cache.pages.take(pages) for _ in read], dtype=torch.int32)
        slots = torch.arange(2 * count).view(2, count) if cache.states else None
        tokens = torch.tensor(read).flatten()
        rows = Rows(torch.arange(length).repeat(count), table, length, slots, tokens)
        x = loaded.embedding[tokens].float()
        inputs = StepInputs(x, (rows,), cache.layers, states=cache.states)
        listener = _Listener(loaded.weights, inputs, EXACT, runner)
        listener.sums = sums
        with torch.inference_mode():
            model.forward(listener)
        done += size * len(some)
        progress(done)
    return Importance(
        {t.name: steps_of(t, sums[t.name].squares, sums[t.name].rows) for t in measured(model)}
    )


def _names(model: Model) -> list[tuple[str, str]]:
    """The names of gate_up and down of each layer with experts."""
    names = []
    for layer in expert_rows(model):
        both = [t for t in model.tensors if t.role is Role.EXPERTS and t.layer == layer]
        first, second = sorted(both, key=lambda tensor: tensor.cut is Cut.COLUMNS)
        names.append((first.name, second.name))
    return names
