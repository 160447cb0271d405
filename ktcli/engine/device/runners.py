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
        """Prepares the experts' computation in a step of `n_tokens` tokens; to be called before the step's work is
        enqueued.

        Args:
            defer: the most experts of each token that may be deferred; None: none.
        """

    def check(self) -> None:
        """Raises the error, if any, of work that ran beside the device's stream in the step, such as the CPU's; to be
        called after the step is done.
        """


class TimedRunner(Runner, Protocol):
    """A runner that records the times of its steps."""

    def operations(self) -> list[tuple[str, int]]:
        """Returns (phase, nanoseconds) pairs: the time that each phase of steps has taken so far."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Computes the experts that are in device memory.

    Attributes:
        stacks: the stacks of each layer, perhaps of no experts.
    """

    kernels: Kernels
    stacks: Sequence[PackedStack]

    def run(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Tensor | None:
        """Returns the weighted sum of a layer's chosen experts that are in device memory, [T, hidden]; None: the layer
        has none there.
        """
        stacks = self.stacks[layer]
        return self.kernels.experts(x, ids, gate, stacks) if stacks.gate_up.count else None

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> OwnExperts | None:
        """Returns a layer's chosen experts that are in device memory, as an object that computes their weighted sum
        when asked; None: the layer has none there.
        """
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
        """Prepares the CPU for a step of `n_tokens` tokens; does nothing if the CPU computes no part of the model."""
        if self._host is not None:
            self._host.begin(n_tokens, defer)

    def outbox(self, layer: int, n_tokens: int) -> Sent | None:
        """Returns the pinned buffers (x, ids and gate, `n_tokens` rows each) into which the router may write a layer's
        input and routing for the CPU; None: there are none, and `start` copies the rows.
        """
        return None if self._host is None else self._host.outbox(layer, n_tokens)

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        """Starts the CPU on its experts of a layer; returns a handle, the `pending` of `along` and `finish`."""
        if self._host is not None and self._host.has(layer):
            self._host.enter(layer, x, ids, gate, sent=sent)
        self._own = self._resident.start(layer, x, ids, gate)
        return layer, x.shape[0], self._own

    def elsewhere(self, part: LayerPart) -> Callable[[Tensor], Tensor] | None:
        """Returns a function that computes the MLP `part` on the CPU, while the device computes its own experts that
        were started; it takes rows [T, H] on the device and returns the MLP's output there. None: the MLP is not in
        main memory.
        """
        host = self._host
        if host is None or not host.has_block(part):
            return None
        own = self._own
        return lambda x: host.compute(part, x, lambda: own and own.sum())

    def along(self, pending: Any, mlp: Mlp) -> Parts | None:
        """Computes the device's share of the experts that were started as `pending` together with an MLP of the same
        rows, in the same kernels. Returns the MLP's output; None: the MLP was not computed.
        """
        own: OwnExperts | None = pending[2]
        return None if own is None else own.along(mlp)

    def finish(self, pending: Any) -> Tensor | Parts:
        """Makes the stream wait for the CPU; returns the weighted sum [T, H] of the layer's chosen experts, the CPU's
        (those deferred come a layer later) and the device's; as `Parts`, not yet added up, if a merged kernel computed
        the device's share.
        """
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
        """Returns (operation, nanoseconds) pairs: the time that each operation of the CPU has taken in all steps so
        far. The device's times are seen only in a trace, as nothing waits for it here.
        """
        return [] if self._host is None else self._host.operations()


class Streamed(Runner):
    """Computes all experts on the device; slabs of them are copied from main memory, one ahead.

    Args:
        slabs: those of each device.
    """

    def __init__(self, slabs: Sequence[SlabStream], resident: Resident) -> None:
        self._slabs, self._resident = slabs, resident

    def begin(self, n_tokens: int, defer: Depths | None = None) -> None:
        """Starts copying the first experts of a step from main memory to the device; `defer` is ignored, as no expert
        is deferred here.
        """
        for slabs in self._slabs:
            slabs.begin()

    def check(self) -> None:
        """Does nothing: the CPU computes no experts."""

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, *, sent: bool = False) -> Any:
        """Computes a layer's chosen experts that are in device memory; returns a handle with the result, the argument
        `pending` of `finish`.
        """
        return layer, x, ids, gate, self._resident.run(layer, x, ids, gate)

    def finish(self, pending: Any) -> Tensor:
        """Computes a layer's chosen experts that are copied from main memory, group by group; returns the weighted sum
        of all chosen experts, [T, H].
        """
        layer, x, ids, gate, total = pending
        for slices in chain.from_iterable(slabs.of_layer(layer) for slabs in self._slabs):
            for stacks in slices:
                part = self._resident.kernels.experts(x, ids, gate, stacks)
                total = part if total is None else total.add_(part)
        return torch.zeros_like(x) if total is None else total
