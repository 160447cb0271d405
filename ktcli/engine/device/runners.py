"""Runners of the routed experts of a step: one class for each way to divide them between CPU and device.

- `Coupled`: the CPU computes those in main memory while the device computes its own; chat uses it.
- `Streamed`: the device computes all, those in main memory after a trip over the link; for long prompts.

Each is a `Runner`. The ways of other programs, one phase after the other, are in measure/baselines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ktcli.engine.device.experts import Depths, HostExperts
from ktcli.engine.device.slabs import SlabStream
from ktcli.ops.part import LayerPart
from ktcli.ops.torch.backend import ExpertRunner, OwnExperts
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merged import Mlp, Parts, Sent
from ktcli.ops.torch.packed import PackedStack
from ktcli.records import dataclass


class Runner(ExpertRunner, Protocol):
    """The interface of what computes the routed experts of a step, on CPU and device."""

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Prepares a step; to be called before the step's work is enqueued.

        Args:
            defer: the most experts of each token that may be deferred; None: none.
        """

    def check(self) -> None:
        """Raises the error of work beside the stream; to be called after the step is done."""


class TimedRunner(Runner, Protocol):
    """A runner that records the times of its steps."""

    def operations(self) -> list[tuple[str, int]]:
        """Returns the (phase, nanoseconds so far) pairs."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Computes the experts that are in device memory.

    Attributes:
        stacks: the stacks of each layer, perhaps of no experts.
    """

    kernels: Kernels
    stacks: Sequence[PackedStack]

    def run(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor | None:
        """Returns the weighted sum of the chosen experts in device memory, [T, hidden]; None if the layer has none."""
        stacks = self.stacks[layer]
        return self.kernels.experts(x, ids, gate, stacks) if stacks.gate_up.count else None

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> OwnExperts | None:
        """Returns the chosen experts in device memory, not computed yet; None if the layer has none."""
        stacks = self.stacks[layer]
        return OwnExperts(self.kernels, stacks, x, ids, gate) if stacks.gate_up.count else None


class Coupled(Runner):
    """Computes experts on CPU and device at the same time.

    Args:
        host: experts in main memory; None: there are none.
    """

    def __init__(self, host: HostExperts | None, resident: Resident) -> None:
        self._host, self._resident = host, resident
        self._own: OwnExperts | None = None  # started and not finished

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Prepares the CPU for a step; does nothing if no experts are in main memory."""
        if self._host is not None:
            self._host.begin(n_tokens, defer)

    def outbox(self, layer: int, n_tokens: int) -> Sent | None:
        """Returns the buffers into which the router may write its rows for the CPU; None: there are none."""
        return None if self._host is None else self._host.outbox(layer, n_tokens)

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        """Starts the CPU on its experts of a layer; returns a handle for `along` and `finish`."""
        if self._host is not None and self._host.has(layer):
            self._host.enter(layer, x, ids, gate, sent=sent)
        self._own = self._resident.start(layer, x, ids, gate)
        return layer, x.shape[0], self._own

    def elsewhere(self, part: LayerPart) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that lets the CPU compute an MLP, while the device computes the experts that were
        started; None: it is not in main memory."""
        host = self._host
        if host is None or not host.has_block(part):
            return None
        own = self._own
        return lambda x: host.compute(part, x, lambda: own and own.sum())

    def along(self, pending: Any, mlp: Mlp) -> Parts | None:
        """Computes the device's experts together with an MLP; returns its output; None: it was not computed."""
        own: OwnExperts | None = pending[2]
        return None if own is None else own.along(mlp)

    def finish(self, pending: Any) -> Tensor | Parts:
        """Waits for the CPU and returns the weighted sum of its and the device's experts, [T, H]."""
        layer, n_tokens, chosen = pending
        self._own = None
        own = None if chosen is None else chosen.sum()
        if self._host is None or not self._host.has(layer):
            return cast(Tensor | Parts, own)
        theirs = self._host.leave(layer, n_tokens)
        if isinstance(own, Parts):
            return replace(own, beside=theirs if own.beside is None else theirs.add_(own.beside))
        return theirs if own is None else cast(Tensor, own.add_(theirs))

    def check(self) -> None:
        """Raises the error that the CPU had in the step, if any."""
        if self._host is not None:
            self._host.check()

    def operations(self) -> list[tuple[str, int]]:
        """Returns the (operation of the CPU, nanoseconds so far) pairs. The device's times are seen only in a
        trace, as nothing waits for it here."""
        return [] if self._host is None else self._host.operations()


class Streamed(Runner):
    """Computes all experts on the device; slabs of them are copied from main memory, one ahead.

    Args:
        slabs: those of each device.
    """

    def __init__(self, slabs: Sequence[SlabStream], resident: Resident) -> None:
        self._slabs, self._resident = slabs, resident

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Prepares a step; `defer` is ignored, as no expert is deferred here."""
        for slabs in self._slabs:
            slabs.begin()

    def check(self) -> None:
        """Does nothing: the CPU computes no experts."""

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        """Computes the experts in device memory; returns a handle for `finish`."""
        return layer, x, ids, gate, self._resident.run(layer, x, ids, gate)

    def finish(self, pending: Any) -> Tensor:
        """Computes the streamed experts slab by slab; returns the weighted sum of all experts, [T, H]."""
        layer, x, ids, gate, total = pending
        for slices in chain.from_iterable(slabs.of_layer(layer) for slabs in self._slabs):
            for stacks in slices:
                part = self._resident.kernels.experts(x, ids, gate, stacks)
                total = part if total is None else total.add_(part)
        return torch.zeros_like(x) if total is None else total
