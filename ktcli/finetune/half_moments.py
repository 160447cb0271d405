"""AdamW whose moments are kept in bf16, in half of their memory. All is computed in f32, as torch's AdamW does, and
what is kept is rounded up or down at random, with the chances that keep its mean: rounded to the nearest, the second
moment would never become smaller, as a step changes it by less than bf16 can tell.

Which way a number is rounded follows from the seed, the step and the name of its tensor alone, so that a run that goes
on rounds as if it had not been stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ktcli.finetune.settings import FinetuneSettings
from ktcli.training.dropout import random_numbers

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
_ROUNDED = 10  # beside the seed: for no other draws
_CHUNK = 1 << 22  # numbers that are computed at once: bounds what lies beside the moments
_LOST_BITS = 16  # of a number in f32


class HalfMoments:
    """The moments of tensors, and the step that uses them.

    Attributes:
        state: bf16, by the name of the tensor and that of the moment.
    """

    def __init__(self, tensors: Mapping[str, Tensor], settings: FinetuneSettings) -> None:
        self._tensors, self._settings = tensors, settings
        self.state = {
            f"{name}.{moment}": torch.zeros_like(each, dtype=torch.bfloat16, requires_grad=False)
            for name, each in tensors.items()
            for moment in MOMENTS
        }

    @torch.no_grad()
    def step(self, number: int, rates: Mapping[str, float]) -> None:
        """Updates the tensors in place by AdamW from their gradients, and the moments, which are rounded to bf16 at
        random.

        Args:
            number: the number of the step, from 1.
            rates: the learning rate of each tensor, by its name.
        """
        for name, tensor in self._tensors.items():
            assert tensor.grad is not None
            flat = tensor.detach().view(-1), tensor.grad.view(-1)
            kept = [self.state[f"{name}.{moment}"].view(-1) for moment in MOMENTS]
            drawn = [
                random_numbers(f"{name}.{m}", self._settings.seed, _ROUNDED, number)
                for m in MOMENTS
            ]
            for chunks in zip(*(torch.split(each, _CHUNK) for each in (*flat, *kept)), strict=True):
                values, gradient, *moments = chunks
                now = [each.float() for each in moments]
                self._move(values, gradient, now, number, rates[name])
                for moment, exact, bits in zip(moments, now, drawn, strict=True):
                    moment.copy_(rounded(exact, next_bits(bits, exact)))

    def _move(
        self, values: Tensor, gradient: Tensor, moments: list[Tensor], number: int, rate: float
    ) -> None:
        """Does torch's AdamW on some numbers, whose moments in f32 it changes."""
        s, betas, (first, second) = self._settings, self._settings.betas, moments
        values.mul_(1 - rate * s.weight_decay)
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        corrected = [1 - beta**number for beta in betas]
        divisor = (second.sqrt() / math.sqrt(corrected[1])).add_(s.adam_epsilon)
        values.addcdiv_(first, divisor, value=-rate / corrected[0])


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Returns x [n] f32 rounded to bf16 [n]: up by one place where its lost bits and `bits`, int32 [n] of 0 to 65,535,
    carry, else down.
    """
    carried: Tensor = (x.view(torch.int32) + bits) >> _LOST_BITS
    return carried.to(torch.int16).view(torch.bfloat16)


def next_bits(source: np.random.SFC64, like: Tensor) -> Tensor:
    """Returns as many random integers of 0 to 65,535 as `like` [n] has elements, int32 [n] on its device, drawn from
    `source`.
    """
    drawn = source.random_raw(-(-len(like) // 4)).view(np.uint16)[: len(like)]
    return torch.from_numpy(drawn.astype(np.int32)).to(like.device)
