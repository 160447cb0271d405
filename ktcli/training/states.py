"""The states of layers in training: every document begins without one, and none is kept behind its last token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewStates:
    """An operation's part of the states of new sequences; see `ops.torch.recurrent.States`."""

    sequences: int

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """Returns zeros, f32 [sequences, *shape]."""
        return torch.zeros(self.sequences, *shape)

    def write(self, values: Tensor) -> None:
        """Forgets values [sequences, …]: nothing comes after a document."""
