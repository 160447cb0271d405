"""The states of layers in training: every document begins without one, and none is kept behind its last token."""

from __future__ import annotations

import torch
from torch import Tensor

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class NewStates:
    """The empty states of new sequences for an operation; see `ops.torch.recurrent.States`."""

    sequences: int
    device: torch.device

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """Returns zeros, f32 [sequences, *shape]."""
        return torch.zeros(self.sequences, *shape, device=self.device)

    def write(self, values: Tensor) -> None:
        """Discards values [sequences, …]: nothing follows a document."""
