"""Deferral written out as its formula says, slot by slot, to judge what is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ktcli.ops.part import LayerPart
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.packed import PackedStack


def late_slots(
    ids: NDArray[np.int32], gate: NDArray[np.float32], elsewhere: NDArray[np.bool_], depth: int
) -> NDArray[np.bool_]:
    """Which slots [T, K] are deferred: of each token the lowest-weighted that the CPU has, but never the
    best two of those; of equal weights the later slot."""
    late = np.zeros(ids.shape, dtype=bool)
    for t in range(len(ids)):
        on_cpu = [k for k, e in enumerate(ids[t]) if e >= 0 and not elsewhere[e]]
        count = min(depth, max(0, len(on_cpu) - 2))
        for k in sorted(on_cpu, key=lambda k: (gate[t, k], -k))[:count]:
            late[t, k] = True
    return late


@dataclass
class DeferredRunner:
    """O_l = h + S + R_l^I + R_{l-1}^D: all experts from stacks on the device, one slot at a time.

    Args:
        resident: bool [layers, experts], those that count as the device's: they are never late.
        depth: asked for; layers whose successor is all the device's, and the last, defer nothing.
        skip: what is late is dropped, to compare.
    """

    kernels: Kernels
    stacks: tuple[PackedStack, ...]
    resident: NDArray[np.bool_]
    depth: int
    skip: bool = False
    late: dict[int, Tensor] = field(default_factory=dict)

    def start(self, layer: int, x: Tensor, ids: Tensor, gate: Tensor) -> Any:
        defers = layer + 1 < len(self.stacks) and not self.resident[layer + 1].all()
        depth = self.depth if defers else 0
        late = late_slots(ids.numpy(), gate.numpy(), self.resident[layer], depth)
        now = self._sum(layer, x, ids, gate, ~late)
        self.late[layer] = self._sum(layer, x, ids, gate, late)
        return layer, now

    def elsewhere(self, part: LayerPart) -> None:
        """The device has all parts."""

    def finish(self, started: Any) -> Tensor:
        layer, now = started
        return now if layer == 0 or self.skip else now + self.late[layer - 1]

    def _sum(
        self, layer: int, x: Tensor, ids: Tensor, gate: Tensor, wanted: NDArray[np.bool_]
    ) -> Tensor:
        stack, total = self.stacks[layer], torch.zeros_like(x)
        kept = torch.where(torch.from_numpy(wanted), ids, -1)
        for k in range(ids.shape[1]):
            one = kept[:, k : k + 1].contiguous(), gate[:, k : k + 1].contiguous()
            total += self.kernels.experts(x, *one, stack)
        return total
