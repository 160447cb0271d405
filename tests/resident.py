"""Experts that all lie on the device: nothing of a step is computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktcli.ops.torch.backend import ExpertRunner, OwnExperts, Value
from ktcli.ops.torch.kernels import Kernels
from ktcli.ops.torch.merged import Mlp, Parts
from ktcli.ops.torch.packed import PackedStack


class ResidentRunner(ExpertRunner):
    """Runs experts that all lie on the device.

    Args:
        stacks: the experts of each layer with experts. One that a layer's slots leave out counts as zero.
    """

    def __init__(self, kernels: Kernels, stacks: Sequence[PackedStack]) -> None:
        self._kernels, self._stacks = kernels, stacks

    def start(
        self, layer: int, x: Value, ids: torch.Tensor, gate: torch.Tensor, *, sent: bool = False
    ) -> OwnExperts:
        return OwnExperts(self._kernels, self._stacks[layer], x, ids, gate)

    def along(self, pending: OwnExperts, mlp: Mlp) -> Parts | None:
        return pending.along(mlp)

    def finish(self, pending: OwnExperts) -> Value | Parts:
        return pending.sum()
