"""AdamW over the trained factors: torch's own, on the tensors that the kernels read; or with moments in bf16.

Moments and gradients have the layout of the factors; the padding there has a gradient of zero and stays zero. Torch's
elementwise operations give the same bits whatever the number of threads; a sum over a whole tensor need not, so that
the norm of the gradient is taken by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ktcli.engine.device.stream import device_errors
from ktcli.errors import NotFinite
from ktcli.finetune.half_moments import MOMENTS, HalfMoments
from ktcli.finetune.settings import FinetuneSettings
from ktcli.training.lora import TrainedFactors
from ktcli.training.stable import one_thread


class FactorOptimizer:
    """AdamW over the factors of an adapter.

    Attributes:
        steps: those that were done.
    """

    def __init__(self, factors: Mapping[str, TrainedFactors], settings: FinetuneSettings) -> None:
        self.steps = 0
        self._limit = settings.max_grad_norm
        self._tensors: dict[str, Tensor] = {}
        for name, each in factors.items():
            each.a.grad, each.b.grad = each.gradient_a, each.gradient_b
            self._tensors |= {f"{name}.a": each.a, f"{name}.b": each.b}
        rate, ratio = settings.learning_rate, settings.loraplus_lr_ratio or 1.0
        sides = {"a": rate, "b": rate * ratio}
        self._highest = {name: sides[name[-1]] for name in self._tensors}
        self._half: HalfMoments | None = None
        if settings.has_half_moments:
            self._half = HalfMoments(self._tensors, settings)
            return
        groups = [
            {"params": [t for n, t in self._tensors.items() if n.endswith(f".{side}")], "highest": high, "lr": high}
            for side, high in sides.items()
        ]  # fmt: skip
        self._adam = torch.optim.AdamW(
            groups,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            foreach=False,  # which would hold temporaries of all factors at once
        )

    @device_errors("a step of the optimizer")
    def step(self, share: float) -> float:
        """Updates the trained factors by AdamW from their gradients, which it clips in place; returns the norm of all
        gradients before that.

        Args:
            share: the learning rate of this step as a fraction of the highest.
        Raises:
            NotFinite: the norm is not finite; no factor has changed.
            DeviceError: the GPU failed, or its memory is full.
        """
        norm = self._norm()
        if not math.isfinite(norm):
            raise NotFinite("the norm of the gradient")
        if self._limit and norm > self._limit:
            for each in self._tensors.values():
                assert each.grad is not None
                each.grad.mul_(self._limit / (norm + 1e-6))  # as torch's clip_grad_norm_
        self.steps += 1
        if self._half is not None:
            self._half.step(self.steps, {n: rate * share for n, rate in self._highest.items()})
            return norm
        for group in self._adam.param_groups:
            group["lr"] = group["highest"] * share
        self._adam.step()
        return norm

    def moments(self) -> dict[str, Tensor]:
        """Returns AdamW's two moments of each factor, by names such as "NAME.a.exp_avg" and "NAME.a.exp_avg_sq": f32 or
        bf16 in the factor's shape, not copied, zeros before the first step.
        """
        if self._half is not None:
            return self._half.state
        found = {}
        for name, tensor in self._tensors.items():
            state = self._adam.state.get(tensor, {})
            for moment in MOMENTS:
                found[f"{name}.{moment}"] = (
                    state[moment] if state else torch.zeros_like(tensor, requires_grad=False)
                )
        return found

    def restore(self, steps: int, moments: Mapping[str, Tensor]) -> None:
        """Sets the number of steps and the moments to those that `moments` returned after `steps` steps, whether in f32
        or bf16.
        """
        self.steps = steps
        if self._half is not None:
            for name, each in self._half.state.items():
                each.copy_(moments[name])
            return
        for name, tensor in self._tensors.items():
            state = {
                moment: moments[f"{name}.{moment}"].to(tensor.device, torch.float32, copy=True)
                for moment in MOMENTS
            }
            self._adam.state[tensor] = {"step": torch.tensor(float(steps)), **state}

    @torch.no_grad()
    def _norm(self) -> float:
        with one_thread():
            squares = [
                float(torch.linalg.vector_norm(each.grad)) ** 2
                for each in self._tensors.values()
                if each.grad is not None
            ]
        return math.sqrt(math.fsum(squares))
